"""The OpenAI-compatible protocol: /v1/completions, for prompts without a chat template."""

import codecs
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from runtime.errors import RequestError
from serve_app.api.access import allowed_models
from serve_app.api.choices import BestOf, choice_count, choice_tasks, generate_choices
from serve_app.api.fields import BodyReader, harmless, token_ids, unserved
from serve_app.api.openai import (
    ChoicesEncoder,
    Common,
    ReplyKind,
    configured,
    task_for,
)
from serve_app.api.reply import Reply
from serve_app.api.tenant import tenant_id
from serve_app.config.options import OPENAI_BOUNDS, number
from serve_app.gateway.backend import ChatBackend
from serve_app.gateway.tasks import (
    Candidate,
    ChatDelta,
    Infill,
    PromptSource,
    RawText,
    TokenIds,
    TokenLogprob,
)

KIND = ReplyKind("text_completion", "text_completion", "cmpl")


class CompletionBody(Common):
    prompt: Any = None
    best_of: Any = None
    logprobs: Any = None
    suffix: str = ""
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
        prompts = _prompts(body.prompt, body.suffix)
        n = choice_count("n", body.n, prompts=len(prompts))
        logprobs = _count(body, "logprobs")
        best_of = _best_of(body, n, prompts=len(prompts))
        per_prompt = n if best_of is None else best_of.candidates
        task = task_for(
            model,
            configured(body, model, _count(body, "max_tokens")),
            prompts[0],
            logprobs=0 if best_of is not None and logprobs is None else logprobs,
            tenant=tenant_id(request),
        )
        encoder = ChoicesEncoder(
            KIND,
            body.model,
            task.id,
            [CompletionChoice(index) for index in range(len(prompts) * n)],
            usage_wanted=body.usage_wanted,
            best_of=best_of,
        )
        tasks = choice_tasks(task, prompts, per_prompt)
        deltas = generate_choices(self._backend, tasks, per_prompt)
        return Reply(deltas, encoder, stream=body.stream)


class CompletionChoice:
    """One choice of a completion."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def chunks(self, delta: ChatDelta) -> list[dict[str, Any]]:
        chunks = []
        if delta.text or delta.logprobs:
            chunks.append(self._choice(delta, None))
        if delta.finish is not None:
            chunks.append(self._choice(ChatDelta(), delta.finish.value))
        return chunks

    def whole(self, delta: ChatDelta) -> dict[str, Any]:
        assert delta.finish is not None
        return self._choice(delta, delta.finish.value)

    def _choice(self, delta: ChatDelta, finish: str | None) -> dict[str, Any]:
        return {
            "index": self._index,
            "text": delta.text,
            "finish_reason": finish,
            "logprobs": self._logprobs(delta.logprobs),
        }

    def _logprobs(self, logprobs: tuple[TokenLogprob, ...]) -> dict[str, Any] | None:
        """The legacy format: parallel lists. Offsets count the whole characters before a token."""
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
    """The token's text, or OpenAI's `bytes:\\x…` notation if its bytes are not valid UTF-8 on their
    own.
    """
    try:
        candidate.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in candidate.raw)
    return candidate.text


def _prompts(prompt: Any, suffix: str = "") -> list[PromptSource]:
    """A text or token ids, or a list of these."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return [_prompt(f"prompt[{index}]", item, suffix) for index, item in enumerate(prompt)]
    return [_prompt("prompt", prompt, suffix)]


def _prompt(place: str, prompt: Any, suffix: str) -> PromptSource:
    if isinstance(prompt, str):
        return Infill(prompt, suffix) if suffix else RawText(prompt)
    if isinstance(prompt, list) and (ids := token_ids(prompt)):
        if suffix:
            raise RequestError(f'field "{place}" must be a string if there is a "suffix"')
        return TokenIds(ids)
    raise RequestError(f'field "{place}" must be a string or a list of token ids')


def _best_of(body: CompletionBody, n: int, *, prompts: int) -> BestOf | None:
    """None if there are no more candidates than choices."""
    if body.best_of is None:
        return None
    candidates = choice_count("best_of", body.best_of, prompts=prompts)
    if candidates < n:
        raise RequestError(
            f'field "best_of" is {candidates}; it must be at least "n", which is {n}'
        )
    if candidates > n and body.stream:
        raise RequestError(
            f'field "best_of" is {candidates}; with "stream" it must be equal to "n", which is {n}'
        )
    wanted = body.logprobs is not None
    return BestOf(n, candidates, logprobs_wanted=wanted) if candidates > n else None


def _count(body: CompletionBody, name: str) -> int | None:
    value = getattr(body, name)
    return None if value is None else int(number(name, value, OPENAI_BOUNDS[name]))
