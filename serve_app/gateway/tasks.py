"""What a protocol asks of a model and what comes back, as plain values that cross processes."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Any

import msgspec

from model_zoo.chat.messages import ImagePart, Message
from runtime.engine.request import FinishReason, ResumeState, SamplingParams, Usage

# The prompts are msgspec structs, not dataclasses: a union on the wire needs their tags.


class Conversation(msgspec.Struct, frozen=True, tag="conversation"):
    """Messages for the model's chat template; `thinking` None leaves that to the template.

    `after`: token ids that stand before them, such as the `context` of an earlier answer.
    `variables`: further variables of the template, JSON values by name.
    """

    messages: tuple[Message, ...]
    thinking: bool | None = None
    after: tuple[int, ...] = ()
    variables: dict[str, Any] = {}


class RawText(msgspec.Struct, frozen=True, tag="text"):
    """Text that no template touches; the file's own rule decides about the BOS token.

    Where it has images, image N stands at `[img-N]`, counted from 0.
    """

    text: str
    images: tuple[ImagePart, ...] = ()


class TokenIds(msgspec.Struct, frozen=True, tag="tokens"):
    """Token ids, taken as they are."""

    ids: tuple[int, ...]


PromptSource = Conversation | RawText | TokenIds


@dataclass(frozen=True, slots=True)
class ChatTask:
    """One request to one model.

    `max_tokens` None: until the context is full. `context_tokens` None: all that the model is
    served with, else a lower limit for this request alone; a higher one is clamped.
    `penalise_prompt`: whether the presence and frequency penalties count the prompt's tokens too,
    as llama.cpp's do and OpenAI's do not; the repeat penalty always does. `prompt_wanted`: the last
    delta tells the prompt's token ids.

    Whichever replica answers makes the same prompt of it: `now` is the time that templates are
    told, None leaves that to the replica. `begun`: what another replica has answered already.

    `keep_alive_s`: how long a model on demand stays loaded after it; None: nothing was said.

    `tenant`: a digest of the name of the API key or client address (`tenant_id`); queues serve
    tenants in turn. `cache_salt`: caches are shared only among tasks with the same one.
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
    begun: ResumeState | None = None
    keep_alive_s: float | None = None
    tenant: str = ""
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class EmbeddingTask:
    """Texts of which one model is asked for their vectors.

    `truncate`: what is longer than the context is cut at its end, else it is refused.
    `context_tokens`, `keep_alive_s` and `tenant` as in `ChatTask`. Nothing of it is cached.
    """

    id: str
    model: str
    texts: tuple[RawText | TokenIds, ...]
    truncate: bool = True
    context_tokens: int | None = None
    keep_alive_s: float | None = None
    tenant: str = ""


Task = ChatTask | EmbeddingTask


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token as clients see it: its text, its exact bytes, its log-probability."""

    text: str
    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The token that was drawn and the most likely ones at its place."""

    drawn: Candidate
    top: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """`runtime.engine.request.Delta` with its log-probabilities spelled out for clients.

    `prompt`: the prompt's token ids, in the delta with `finish` and where they were wanted.
    `vectors`: what an `EmbeddingTask` asked for, in its order, each as little-endian float32.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    error: str | None = None
    prompt: tuple[int, ...] = ()
    vectors: tuple[bytes, ...] = ()


def merge(deltas: list[ChatDelta]) -> ChatDelta:
    """All deltas of an answer as one."""
    last = deltas[-1]
    return ChatDelta(
        "".join(delta.text for delta in deltas),
        tuple(chain.from_iterable(delta.tokens for delta in deltas)),
        tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
        last.finish,
        next((delta.usage for delta in reversed(deltas) if delta.usage is not None), None),
        last.error,
        last.prompt,
        tuple(chain.from_iterable(delta.vectors for delta in deltas)),
    )


def together(deltas: Iterable[ChatDelta]) -> ChatDelta:
    """Answers to parts of an embedding request as one: all vectors, what they cost together."""
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
