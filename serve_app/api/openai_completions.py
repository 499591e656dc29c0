"""The OpenAI-compatible protocol: /v1/completions, for prompts without a chat template."""

import codecs
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from runtime.errors import RequestError
from serve_app.api.access import allowed_models, key_of
from serve_app.api.choices import BestOf, choice_count, choice_tasks, generate_choices
from serve_app.api.fields import BodyReader, harmless, token_ids, unserved
from serve_app.api.openai import (
    ChoicesEncoder,
    CompletionFields,
    ReplyKind,
    configured,
    openai_task,
)
from serve_app.api.reply import Reply
from serve_app.api.vllm_extras import with_extras
from serve_app.config.options import LONGEST, OPENAI_BOUNDS, Bounds, number
from serve_app.gateway.backend import ChatBackend
from serve_app.messages.tasks import (
    Candidate,
    ChatDelta,
    EchoedPrompt,
    Infill,
    PromptSource,
    RawText,
    TokenIds,
    TokenLogprob,
)

KIND = ReplyKind("text_completion", "text_completion", "cmpl")


class CompletionBody(CompletionFields):
    prompt: Any = None
    best_of: Any = None
    logprobs: Any = None
    suffix: str = ""
    echo: bool = False
    add_special_tokens: bool = True
    parallel_tool_calls: Any = harmless()
    thinking_token_budget: Any = unserved(-1)


@dataclass(frozen=True, slots=True)
class OpenAICompletions:
    """Answers /v1/completions."""

    backend: ChatBackend
    bodies: BodyReader

    async def complete(self, request: Request) -> Response:
        body = await self.bodies.read(CompletionBody, request)
        model = await self.backend.served(body.model, allowed_models(request))
        prompts = await self.bodies.convert(request, _prompts, body)
        n = choice_count("n", body.n, prompts=len(prompts))
        logprobs = _count(body, "logprobs")
        best_of = _best_of(body, n, prompts=len(prompts))
        per_prompt = n if best_of is None else best_of.candidates
        most = _max_tokens(body)
        task = openai_task(
            request,
            model,
            configured(body, model, most),
            prompts[0],
            logprobs=0 if best_of is not None and logprobs is None else logprobs,
            output=body.output_form(),
        )
        task = with_extras(task, body, key_of(request.scope))
        if body.echo:
            task = replace(task, echo=True, max_tokens=0 if most == 0 else task.max_tokens)
        encoder = ChoicesEncoder(
            KIND,
            body.model,
            body.request_id or task.id,
            [CompletionChoice(index) for index in range(len(prompts) * n)],
            usage_wanted=body.usage_wanted,
            continuous_usage=body.continuous_usage,
            best_of=best_of,
        )
        tasks = choice_tasks(task, prompts, per_prompt)
        deltas = generate_choices(self.backend, tasks, per_prompt)
        return Reply(deltas, encoder, stream=body.stream)


class CompletionChoice:
    """One choice of a completion."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def chunks(self, delta: ChatDelta) -> list[dict[str, Any]]:
        chunks = []
        if delta.text or delta.logprobs or delta.echo is not None:
            chunks.append(self._choice(delta, None))
        if delta.finish is not None:
            ending = ChatDelta(matched=delta.matched)
            chunks.append(self._choice(ending, delta.finish.value))
        return chunks

    def whole(self, delta: ChatDelta) -> dict[str, Any]:
        assert delta.finish is not None
        return self._choice(delta, delta.finish.value)

    def _choice(self, delta: ChatDelta, finish: str | None) -> dict[str, Any]:
        echo = delta.echo or EchoedPrompt("")
        logprobs = _prompt_lists(echo)
        self._characters += len(echo.text)
        for name, values in self._answer_lists(delta.logprobs).items():
            logprobs[name] += values
        choice = {
            "index": self._index,
            "text": echo.text + delta.text,
            "finish_reason": finish,
            "logprobs": logprobs if logprobs["tokens"] else None,
        }
        return choice if finish is None else choice | {"stop_reason": delta.matched}

    def _answer_lists(self, logprobs: tuple[TokenLogprob, ...]) -> dict[str, list[Any]]:
        """The legacy format: parallel lists. Offsets count the whole characters before a token."""
        offsets = []
        for entry in logprobs:
            offsets.append(self._characters)
            self._characters += len(self._decoder.decode(entry.drawn.raw))
        return _lists(logprobs) | {"text_offset": offsets}


def _prompt_lists(echo: EchoedPrompt) -> dict[str, list[Any]]:
    """The same for the prompt, whose first token has no log-probability.

    The text lacks some of the tokens, such as BOS, so offsets are counted from its end.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    sizes = [len(decoder.decode(entry.drawn.raw)) for entry in echo.tokens]
    rest = accumulate(reversed(sizes))
    offsets = [max(0, len(echo.text) - size) for size in rest]
    lists = _lists(echo.tokens) | {"text_offset": offsets[::-1]}
    for name in ("token_logprobs", "top_logprobs"):
        lists[name][:1] = [None] * len(echo.tokens[:1])
    return lists


def _lists(logprobs: tuple[TokenLogprob, ...]) -> dict[str, list[Any]]:
    """The most likely tokens include the sampled one, even if there is then one more than
    requested."""
    return {
        "tokens": [_label(entry.drawn) for entry in logprobs],
        "token_logprobs": [entry.drawn.logprob for entry in logprobs],
        "top_logprobs": [
            {_label(each): each.logprob for each in (*entry.top, entry.drawn)} for entry in logprobs
        ],
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


def _prompts(body: CompletionBody) -> list[PromptSource]:
    """A text or token ids, or a list of these."""
    prompt = body.prompt
    if body.echo and body.suffix:
        raise RequestError('the fields "echo" and "suffix" are not served together')
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return [_prompt(f"prompt[{index}]", item, body) for index, item in enumerate(prompt)]
    return [_prompt("prompt", prompt, body)]


def _prompt(place: str, prompt: Any, body: CompletionBody) -> PromptSource:
    suffix = body.suffix
    if isinstance(prompt, str):
        return Infill(prompt, suffix) if suffix else RawText(prompt, bos=body.add_special_tokens)
    if ids := token_ids(prompt):
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


def _max_tokens(body: CompletionBody) -> int | None:
    """The limit of the answer; 0 if only the prompt is requested, -1: none."""
    if not body.echo or body.max_tokens is None:
        return _count(body, "max_tokens")
    return int(number("max_tokens", body.max_tokens, Bounds(int, 0, LONGEST, unlimited=True)))


def _count(body: CompletionBody, name: str) -> int | None:
    value = getattr(body, name)
    return None if value is None else int(number(name, value, OPENAI_BOUNDS[name]))
