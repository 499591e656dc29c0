"""Tasks of the protocols and the deltas of their answers: plain values that cross processes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from typing import Any, ClassVar

import msgspec

from model_zoo.chat.formats.reply_format import ReplyFormat
from model_zoo.chat.formats.reply_parser import ReplyParser
from model_zoo.chat.messages import ImagePart, Message, ReplyStart
from model_zoo.grammars.constraint import CallRule, OutputForm
from runtime.engine.request import (
    NO_ORIGIN,
    FinishReason,
    RequestOrigin,
    ResumeState,
    SamplingParams,
    Usage,
)

# The prompts are msgspec structs, because members of a union need tags when serialised.


class Conversation(msgspec.Struct, frozen=True, tag="conversation"):
    """Messages for the model's chat template; with `thinking` None the template decides.

    `after`: token ids before the messages, such as the `context` of an earlier answer.
    `variables`: further variables of the template, JSON values by name. `tools`: the functions
    that the model may call, as OpenAI describes them. `thinking_optional`: a model that cannot
    think ignores `thinking` instead of refusing it. `template`: of the request, instead of the
    model's. `default_template`: for a model that has none. `reply`: what the prompt ends with.
    `thinking_budget`: the limit of the answer's thinking in tokens; None: no limit.
    `budget_message`: the text before a forced end of thinking.
    """

    messages: tuple[Message, ...]
    thinking: bool | str | None = None
    after: tuple[int, ...] = ()
    variables: dict[str, Any] = {}
    tools: tuple[dict[str, Any], ...] = ()
    thinking_optional: bool = False
    template: str = ""
    default_template: str = ""
    reply: ReplyStart = ReplyStart.NEW
    thinking_budget: int | None = None
    budget_message: str = ""


class RawText(msgspec.Struct, frozen=True, tag="text"):
    """Text without a template; the model file decides about a BOS token, unless `bos` is unset:
    there is none then.

    `[img-N]` in the text stands for image N, counted from 0.
    """

    text: str
    images: tuple[ImagePart, ...] = ()
    bos: bool = True


class TokenIds(msgspec.Struct, frozen=True, tag="tokens"):
    """Token ids, used unchanged."""

    ids: tuple[int, ...]


class Infill(msgspec.Struct, frozen=True, tag="infill"):
    """Two texts; the answer stands between them. `template` as in `Conversation`."""

    before: str
    after: str
    template: str = ""


PromptSource = Conversation | RawText | TokenIds | Infill


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a prompt that does not fit into the context is shortened.

    `turns`: the oldest turns of a conversation are left out; otherwise tokens, except the first
    `keep` and the last ones.
    """

    turns: bool = False
    keep: int = 0


@dataclass(frozen=True, slots=True)
class EndRules:
    """Rules for the end of an answer, besides its length and its stop strings.

    `min_tokens`: only the length can end the answer earlier. `tokens` end it, as the model's own
    end tokens do, which `ignore_model` disables. A complete form ends it in spite of both.
    `keep_match`: the text includes the stop string or token that ended it.
    """

    min_tokens: int = 0
    tokens: tuple[int, ...] = ()
    ignore_model: bool = False
    keep_match: bool = False


@dataclass(frozen=True, slots=True)
class ChatTask:
    """One request to one model.

    `max_tokens` None: until the context is full. `context_tokens`: a lower context limit for this
    request; None or a higher one means the limit of the served model. `penalise_prompt`: the
    presence and frequency penalties count the prompt's tokens too, as in llama.cpp and unlike
    OpenAI; the repeat penalty always does. `prompt_wanted`: the last delta has the prompt's ids.

    Every replica makes the same prompt of a task: `now` is the time that templates see; None means
    the time of the replica. `resume`: the part of the answer that other replicas have produced.

    `keep_alive_s`: how long a model on demand stays loaded afterwards; None if not requested.

    `tenant`: a digest of the name of the API key or client address (`tenant_id`); queues serve
    tenants in turn. `cache_salt`: only tasks with the same salt share caches.

    `truncation`: None: a prompt that does not fit is refused.

    `echo`: the first delta has the prompt, with log-probabilities if `sampling` requests them for
    the answer. With it, `max_tokens` may be 0: nothing is generated.

    `output`: the form of the text; `calls`: how tools may be called. None: not constrained.

    `trace`: the replica writes a trace of the request. `origin`: the HTTP request.

    `shift_keep`: an answer that fills the context continues after the oldest tokens are dropped,
    except for the first `shift_keep` ones, below 0 the prompt (`ContextShift`), for up to 10
    contexts. None: it ends.

    `priority`: in a replica, waiting tasks with lower numbers are admitted first.

    `bad_words`: texts that the answer must not contain, in their usual tokenisation.
    """

    id: str
    model: str
    prompt: PromptSource
    sampling: SamplingParams
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    context_tokens: int | None = None
    penalise_prompt: bool = True
    prompt_wanted: bool = False
    now: datetime | None = None
    resume: ResumeState | None = None
    keep_alive_s: float | None = None
    tenant: str = ""
    cache_salt: str = ""
    truncation: Truncation | None = None
    ending: EndRules = EndRules()
    echo: bool = False
    output: OutputForm | None = None
    calls: CallRule | None = None
    trace: bool = False
    shift_keep: int | None = None
    origin: RequestOrigin = NO_ORIGIN
    priority: int = 0
    bad_words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptTask:
    """A request for the tokens of a prompt, or for the text of token ids; nothing is generated.

    `vocabulary_wanted`: the reply has the tokens as the vocabulary spells them. The other fields as
    in `ChatTask`.
    """

    id: str
    model: str
    prompt: PromptSource
    vocabulary_wanted: bool = False
    context_tokens: int | None = None
    now: datetime | None = None
    keep_alive_s: float | None = None
    tenant: str = ""
    cache_salt: str = ""
    origin: RequestOrigin = NO_ORIGIN
    # `echo` returns the whole prompt, so it is not truncated.
    truncation: ClassVar[None] = None
    max_tokens: ClassVar[None] = None


@dataclass(frozen=True, slots=True)
class EmbeddingTask:
    """Texts to embed with one model. They are not cached.

    `truncate`: texts longer than the context are cut at their end, otherwise rejected.
    `context_tokens`, `keep_alive_s` and `tenant` as in `ChatTask`. With `queries`, one for each
    text or one for all, the texts are ranked: a vector is then one score.
    """

    id: str
    model: str
    texts: tuple[RawText | TokenIds, ...]
    truncate: bool = True
    context_tokens: int | None = None
    keep_alive_s: float | None = None
    tenant: str = ""
    queries: tuple[RawText, ...] = ()
    origin: RequestOrigin = NO_ORIGIN


Task = ChatTask | EmbeddingTask | PromptTask


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token for clients: its text, its exact bytes and its log-probability."""

    text: str
    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The sampled token and the most likely ones at its position."""

    drawn: Candidate
    top: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt as part of its answer: its text and, if requested, its tokens. The log-probability
    of the first token is meaningless."""

    text: str
    tokens: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The answer to a `PromptTask`. `text`: of given token ids, with control tokens; otherwise
    empty. `context_tokens`: the limit of prompt and answer together."""

    ids: tuple[int, ...]
    context_tokens: int
    vocabulary: tuple[str, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class ReplyOpening:
    """How to parse the text of a reply. `thinks`: the prompt ends within thinking; `continues`:
    within the text. `formed`: the text has a required form. `guided`: a grammar holds the text or
    the calls to a form."""

    format: ReplyFormat
    thinks: bool = False
    formed: bool = False
    guided: bool = False
    continues: bool = False

    def parser(self, tools: Sequence[dict[str, Any]]) -> ReplyParser:
        """A parser of the reply to a request that declares `tools`."""
        functions = [tool["function"] for tool in tools]
        return self.format.parser(
            {each["name"]: each["parameters"] for each in functions},
            thinks=self.thinks,
            formed=self.formed,
            guided=self.guided,
            continues=self.continues,
        )


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """`runtime.engine.request.Delta` with log-probabilities as clients need them.

    `prompt`: the prompt's token ids, in the delta with `finish` if requested. `vectors`: results of
    an `EmbeddingTask`, in the order of its texts, each as little-endian float32. `opening`: in the
    first delta of a replica's reply to a conversation; the text may contain thinking and tool calls
    in that format. `choices`: deltas of single choices with their index, if a request has several;
    `tokens`, `usage` and `finish` are then those of all choices together. `echo`: in the first
    delta of a task with `echo`. `thinking_tokens`: how many of `tokens` are thinking.
    `prompt_tokens`: result of a `PromptTask`.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    error: str | None = None
    prompt: tuple[int, ...] = ()
    vectors: tuple[bytes, ...] = ()
    opening: ReplyOpening | None = None
    choices: "tuple[tuple[int, ChatDelta], ...]" = ()
    echo: EchoedPrompt | None = None
    matched: str | int | None = None
    thinking_tokens: int = 0
    prompt_tokens: PromptTokens | None = None


def merge(deltas: list[ChatDelta]) -> ChatDelta:
    """Merges consecutive deltas of an answer into one."""
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    return replace(
        last,
        text="".join(delta.text for delta in deltas),
        tokens=tuple(chain.from_iterable(delta.tokens for delta in deltas)),
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
        usage=next((delta.usage for delta in reversed(deltas) if delta.usage is not None), None),
        vectors=tuple(chain.from_iterable(delta.vectors for delta in deltas)),
        opening=next((delta.opening for delta in deltas if delta.opening is not None), None),
        choices=tuple(chain.from_iterable(delta.choices for delta in deltas)),
        echo=next((delta.echo for delta in deltas if delta.echo is not None), None),
        thinking_tokens=sum(delta.thinking_tokens for delta in deltas),
    )


def merge_embeddings(deltas: Iterable[ChatDelta]) -> ChatDelta:
    """Merges the answers to the parts of an embedding request, with the sum of their usage."""
    parts = list(deltas)
    usages = [part.usage for part in parts if part.usage is not None]
    usage = Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=0,
        completion_tokens=0,
        queue_ns=max((usage.queue_ns for usage in usages), default=0),
        prompt_ns=max((usage.prompt_ns for usage in usages), default=0),
        decode_ns=0,
    )
    vectors = tuple(chain.from_iterable(part.vectors for part in parts))
    return ChatDelta(finish=FinishReason.STOP, usage=usage, vectors=vectors)
