"""The OpenAI-compatible protocol: /v1/completions, for prompts that no template touches."""

import codecs
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from runtime.errors import RequestError
from serve_app.api.access import allowed_models
from serve_app.api.fields import BodyReader, harmless, token_ids, unserved
from serve_app.api.openai import (
    Accounting,
    Common,
    StreamEncoder,
    configured,
    event,
    task_for,
)
from serve_app.api.reply import Reply
from serve_app.api.tenant import tenant_id
from serve_app.config.options import OPENAI_BOUNDS, number
from serve_app.gateway.backend import ChatBackend
from serve_app.gateway.tasks import (
    Candidate,
    ChatDelta,
    PromptSource,
    RawText,
    TokenIds,
    TokenLogprob,
)


class CompletionBody(Common):
    prompt: Any = None
    logprobs: Any = None
    suffix: Any = unserved()
    add_special_tokens: Any = unserved(True)
    parallel_tool_calls: Any = harmless()


class OpenAICompletions:
    """Answers /v1/completions."""

    def __init__(self, backend: ChatBackend, bodies: BodyReader) -> None:
        self._backend = backend
        self._bodies = bodies

    async def complete(self, request: Request) -> Response:
        body = await self._bodies.read(CompletionBody, request)
        model = await self._backend.served(body.model, allowed_models(request))
        options = configured(body, model, _count(body, "max_tokens"))
        task = task_for(
            model,
            options,
            _prompt(body.prompt),
            logprobs=_count(body, "logprobs"),
            tenant=tenant_id(request),
        )
        encoder = CompletionEncoder(body.model, task.id, usage_wanted=body.usage_wanted)
        return Reply(self._backend.generate(task), encoder, stream=body.stream)


class CompletionEncoder(StreamEncoder):
    """One completion, streamed or whole."""

    def __init__(self, model: str, task_id: str, *, usage_wanted: bool) -> None:
        self._accounting = Accounting(model, f"cmpl-{task_id}")
        self._usage_wanted = usage_wanted
        self._characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def piece(self, delta: ChatDelta) -> bytes:
        events = []
        if delta.text or delta.logprobs:
            events.append(self._chunk([self._choice(delta, None)]))
        if delta.finish is not None:
            events.append(self._chunk([self._choice(ChatDelta(), delta.finish.value)]))
            if self._usage_wanted:
                events.append(self._chunk([], self._accounting.usage(delta)))
            events.append(b"data: [DONE]\n\n")
        return b"".join(events)

    def whole(self, delta: ChatDelta) -> bytes:
        assert delta.finish is not None
        choice = self._choice(delta, delta.finish.value)
        return self._accounting.reply("text_completion", [choice], delta)

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        frame = self._accounting.frame("text_completion") | {"choices": choices}
        return event(frame | (usage or {}))

    def _choice(self, delta: ChatDelta, finish: str | None) -> dict[str, Any]:
        return {
            "index": 0,
            "text": delta.text,
            "finish_reason": finish,
            "logprobs": self._logprobs(delta.logprobs),
        }

    def _logprobs(self, logprobs: tuple[TokenLogprob, ...]) -> dict[str, Any] | None:
        """The older format: parallel lists. Offsets count whole characters before a token."""
        if not logprobs:
            return None
        offsets = []
        for entry in logprobs:
            offsets.append(self._characters)
            self._characters += len(self._decoder.decode(entry.drawn.raw))
        return {
            "tokens": [_label(entry.drawn) for entry in logprobs],
            "token_logprobs": [entry.drawn.logprob for entry in logprobs],
            "top_logprobs": [
                {_label(candidate): candidate.logprob for candidate in entry.top}
                for entry in logprobs
            ],
            "text_offset": offsets,
        }


def _label(candidate: Candidate) -> str:
    """The token's text, or as OpenAI has it its bytes where these are no text by themselves."""
    try:
        candidate.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in candidate.raw)
    return candidate.text


def _prompt(prompt: Any) -> PromptSource:
    """Text, token ids, or a list of exactly one of these."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        return _prompt(prompt[0])
    if isinstance(prompt, str):
        return RawText(prompt)
    if isinstance(prompt, list) and (ids := token_ids(prompt)):
        return TokenIds(ids)
    if isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list):
        raise RequestError('field "prompt" holds several prompts, which is not served yet')
    raise RequestError('field "prompt" must be a string or a list of token ids')


def _count(body: CompletionBody, name: str) -> int | None:
    value = getattr(body, name)
    return None if value is None else int(number(name, value, OPENAI_BOUNDS[name]))
