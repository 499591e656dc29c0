"""What goes into the engine and what comes out: requests and deltas, as plain values."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

MAX_TOP_LOGPROBS = 20


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_tokens reached, or the context is full
    ABORTED = "aborted"  # the client left
    FAILED = "failed"  # the engine failed; `Delta.error` says how


class Pooling(Enum):
    """Which of a prompt's hidden states become its vector."""

    MEAN = "mean"
    CLS = "cls"  # the first one
    LAST = "last"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn.

    temperature 0 takes the most likely token. top_k 0 keeps all tokens, top_p 1 and min_p 0
    switch their filter off. The penalties look at the last `repeat_last_n` tokens of prompt and
    answer together (0: none of them, None: the whole sequence); repeat_penalty divides positive
    and multiplies negative logits, the other two subtract. The subtracting ones count no token at
    a position before `counted_from`. `logprobs` None asks for none, n asks
    for the drawn token's log-probability and those of the n most likely ones, taken from the raw
    logits. The random number of a token depends on (seed, position) alone.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.9
    min_p: float = 0.0
    seed: int = 0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int | None = 64
    counted_from: int = 0
    logprobs: int | None = None

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change the logits of the next one."""
        return self.repeat_last_n != 0 and (
            self.repeat_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class StopRules:
    """When to end: after `max_tokens`, at an end token (not emitted), or before a stop string."""

    max_tokens: int
    end_tokens: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Placeholder positions [start, start + length) of one image, or of a part of it.

    `whole`: attention inside is bidirectional, so no step may end inside. `digest` names pixels,
    processor settings and projector together. `cross_rows`: rows that it brings for layers that
    attend to images from the side; `cross_padding`: further ones, which only text before the first
    image can see, and only where the model says so (`Cross.lead_in` in runtime/kv/spec.py).
    `first_row`: the row of the image's features that stands at `start`. `grid`: rows and columns
    of the rectangle that the positions are, for models that place them in two dimensions.
    """

    start: int
    length: int
    whole: bool
    digest: bytes
    cross_rows: int = 0
    cross_padding: int = 0
    first_row: int = 0
    grid: tuple[int, int] | None = None

    @property
    def end(self) -> int:
        return self.start + self.length


class RequestImage(Protocol):
    """What is known here of an image whose features, so many rows, are yet to be computed."""

    @property
    def digest(self) -> bytes: ...

    @property
    def rows(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ResumeState:
    """What another engine has drawn of an answer, and how many characters its reader got already.

    With log-probabilities these may be more than the text of `tokens`, which then end where the
    log-probabilities do: what was drawn beyond is drawn again. Without `had_turn` nothing was: the
    request had a place and waited for its turn, and does so here.
    """

    tokens: tuple[int, ...] = ()
    characters: int = 0
    had_turn: bool = True


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A tokenised prompt and the rules of its continuation; `id` is unique among live requests.

    `images`: what the features of the spans of equal digest are computed from, each once (see
    PreparedImage). Rows of features replace the embeddings of a span, or go to the
    layers that attend to images from the side. A span of none of them has no features.

    With `pooling` nothing is continued: the prompt's states become one vector, and `stop` says
    one token. A prompt that is read in both directions has a single whole span over all of it.

    `begun`: the answer goes on from there, as if all of it were drawn here. If it had its turn
    elsewhere, it goes before those that wait for their first one.

    `tenant`: on whose behalf; those that wait are served by turns over their tenants. Cached
    prefixes are shared only among requests with equal `cache_salt`, at most 64 bytes.
    """

    id: str
    prompt: tuple[int, ...]
    stop: StopRules
    sampling: SamplingParams = SamplingParams()
    spans: tuple[ImageSpan, ...] = ()
    pooling: Pooling | None = None
    images: tuple[RequestImage, ...] = ()
    begun: ResumeState | None = None
    tenant: str = ""
    cache_salt: bytes = b""

    @property
    def known(self) -> tuple[int, ...]:
        """All tokens that exist before anything is computed here."""
        return self.prompt + self.begun.tokens if self.begun is not None else self.prompt


@dataclass(frozen=True, slots=True)
class Alternative:
    """One candidate token and its log-probability (natural logarithm)."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token a step drew for one sequence; log-probabilities only where they were asked for."""

    token: int
    logprob: float | None = None
    top: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class DrawFailure:
    """No token could be drawn for one sequence; the other ones of the step are not concerned."""

    reason: str


@dataclass(frozen=True, slots=True)
class Pooled:
    """The vector of a prompt, little-endian float32."""

    vector: bytes


Outcome = Sampled | DrawFailure | Pooled


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost. Token counts; durations in nanoseconds.

    `prompt_tokens` includes `cached_tokens`, which the prefix cache gave. `queue_ns` runs from
    arrival to the first step that computes for the request, `prompt_ns` from there to the first
    sampled token, `decode_ns` from there to the end. `completion_tokens` counts an end token.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_ns: int
    prompt_ns: int
    decode_ns: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What a request has produced since its last delta; exactly one, the last, has `finish`.

    `tokens` are all ids sampled since then, also those whose text is still held back and the end
    token. `logprobs` belong to the text in this delta (nothing for text a stop string cut off).
    `usage`: in the first delta the cost so far, in the last one all of it.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Sampled, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    error: str | None = None
    vector: bytes | None = None  # of a pooled prompt, as in `Pooled`

    def merged(self, later: "Delta") -> "Delta":
        """This delta and the one after it as one."""
        return Delta(
            self.text + later.text,
            self.tokens + later.tokens,
            self.logprobs + later.logprobs,
            later.finish,
            later.usage or self.usage,
            later.error,
            later.vector,
        )
