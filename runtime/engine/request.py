"""Input and output of the engine, as plain values: requests and deltas."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from runtime.errors import CaravanError, GenerationFailedError

MAX_TOP_LOGPROBS = 20
# Maximum number of biased tokens of a request, as in OpenAI's API, and of tokens barred at the
# start of an answer.
MAX_LOGIT_BIASES = 300
MAX_BARRED_TOKENS = 212
# Maximum number of token sequences for `bad_words` (two per word), and their maximum length.
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 256, 32
# Maximum number of log-probabilities of a prompt, those of alternatives included.
MAX_PROMPT_LOGPROBS = 2**17


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """The HTTP request that work belongs to. `id`: for logs; clients may choose it, so it is not
    unique. `traceparent`: the parent span in W3C Trace Context's format. Empty strings: unknown."""

    id: str = ""
    traceparent: str = ""


NO_ORIGIN = RequestOrigin()


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_tokens reached, or the context is full
    ABORTED = "aborted"  # the client disconnected
    FAILED = "failed"  # `Delta.error` has the reason


class Pooling(Enum):
    """Which hidden states of a prompt its vector is computed from."""

    MEAN = "mean"
    CLS = "cls"  # the first one
    LAST = "last"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is sampled.

    temperature 0 takes the most likely token. top_k 0, top_p 1 and min_p 0 disable their filter.
    The penalties read the last `repeat_last_n` tokens of prompt and answer together (0: none, None:
    all); repeat_penalty divides positive and multiplies negative logits, the other two subtract and
    ignore tokens at positions before `counted_from`. `logprobs` n: return the log-probability of
    the sampled token and of the n most likely ones, from the raw logits; None: return none. The
    random number of a token depends on (seed, position) only.

    `logit_bias`: token ids, each once, and what is added to their logits before the penalties.
    `barred` tokens are not sampled at positions before `barred_until`.

    `dropped`: tokens that have left the context before the first position (`ContextShift`); they
    count in the position that a random number depends on. Penalties read the context only.

    The samplers below `barred_until` are those of llama.cpp; typical_p 1, top_n_sigma 0,
    xtc_probability 0 and dynatemp_range 0 disable them. With any of them (`chained`) the samplers
    follow each other as in llama.cpp, with the temperature last; without, it comes first.

    dry_multiplier 0 disables DRY, which follows the penalties; dry_penalty_last_n -1 reads the
    whole sequence. `dry_breakers`: bit `token % 32` of the 32-bit word `token // 32` is set for the
    tokens that contain one of `dry_sequence_breakers`, which the engine does not read.

    `allowed`: the only tokens that are sampled, in words like those of `dry_breakers`; empty: all.
    `bad_words`: token sequences; a token that would complete one is not sampled. Only tokens from
    position `words_from` on count as part of one.
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
    logit_bias: tuple[tuple[int, float], ...] = ()
    barred: tuple[int, ...] = ()
    barred_until: int = 0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    dry_breakers: bytes = b""
    dropped: int = 0
    allowed: bytes = b""
    bad_words: tuple[tuple[int, ...], ...] = ()
    words_from: int = 0

    @property
    def repetitive(self) -> bool:
        """Whether DRY applies."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    @property
    def chained(self) -> bool:
        """Whether a sampler of runtime/worker/sampler_chain.py applies."""
        return (
            self.typical_p < 1
            or self.top_n_sigma > 0
            or (self.xtc_probability > 0 and self.xtc_threshold <= 0.5)
            or self.dynatemp_range > 0
        )

    @property
    def biased(self) -> bool:
        """Whether logits of single tokens change."""
        return bool(self.logit_bias or self.barred)

    @property
    def restricted(self) -> bool:
        """Whether some tokens may not be sampled, depending on those before or not."""
        return bool(self.allowed or self.bad_words)

    @property
    def penalised(self) -> bool:
        """Whether a penalty applies."""
        return self.repeat_last_n != 0 and (
            self.repeat_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class StopRules:
    """When the answer ends: after `max_tokens`, at an end token or at a stop string.

    End token and stop string are not part of the text, unless `keep_match` is set. `reported`: what
    `Delta.matched` is for those of the end tokens that it names. Stop strings that are complete
    within the first `min_tokens` tokens do not end the answer. `max_tokens` 0: only
    `prompt_logprobs` are computed.
    """

    max_tokens: int
    end_tokens: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    reported: Mapping[int, int | str] = field(default_factory=dict, hash=False)
    min_tokens: int = 0
    keep_match: bool = False


@dataclass(frozen=True, slots=True)
class ContextShift:
    """How an answer continues when prompt and answer fill a context of `context_tokens`: the oldest
    half of the tokens after the first `keep`, below 0 the whole prompt, leaves the context
    (runtime/engine/context_shift.py)."""

    context_tokens: int
    keep: int = 0


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Placeholder positions [start, start + length) of one image, or of a part of it.

    `whole`: attention inside is bidirectional, so no step may end inside. `digest` identifies
    pixels, processor settings and projector together. `cross_rows`: rows of the image for
    cross-attention layers; `cross_padding`: further rows, which only text before the first image
    sees, and only in models with `Cross.lead_in`. `first_row`: the row of the
    image's features at `start`. `grid`: rows and columns of the rectangle that the positions form,
    for models with two-dimensional positions.
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
    """An image of a request: its digest and the number of its feature rows."""

    @property
    def digest(self) -> bytes: ...

    @property
    def rows(self) -> int: ...


class Matcher(Protocol):
    """The state of a grammar in one answer."""

    @property
    def free(self) -> int:
        """How many of the next tokens need no mask, whichever tokens precede them."""

    def accept(self, token: int) -> None:
        """The answer continues with `token`."""

    def allowed(self, mask: memoryview) -> None:
        """Writes the tokens that may follow to `mask`, as bit `token % 32` of the 32-bit words.

        It may take long and runs on another thread than `accept`, never at the same time. Raises
        GenerationFailedError if the answer does not follow the grammar or costs too much to match.
        """

    def acceptable(self, tokens: Sequence[int]) -> int:
        """The number of leading `tokens` that the grammar allows next; keeps the state."""

    def look_ahead(self, tokens: Sequence[int], masks: Sequence[memoryview]) -> None:
        """Writes to each of `masks` what `allowed` would write after the corresponding prefix of
        `tokens`, as far as the grammar allows these; other masks are not written. Called after
        `allowed`; does not change the state."""


class Grammar(Protocol):
    """A constraint on the tokens of an answer."""

    def matcher(self) -> Matcher:
        """A new state, before the first token."""


@dataclass(frozen=True, slots=True)
class ResumeState:
    """The part of an answer that another engine has sampled: `tokens`, and `characters`, the number
    of characters that the client has received.

    With log-probabilities, `tokens` end where the received log-probabilities end; the client may
    have the text of later tokens, which are sampled again. `had_turn` False: the request was still
    waiting, and waits here too.
    """

    tokens: tuple[int, ...] = ()
    characters: int = 0
    had_turn: bool = True


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A tokenised prompt and how to continue it; `id` is unique among live requests.

    `images`: the images of the spans, one for each digest (see PreparedImage). Their feature rows
    replace the embeddings of a span, or are the input of cross-attention layers. A span without an
    image has no features.

    With `pooling` nothing is generated: the hidden states of the prompt become one vector, and
    `stop` allows one token. Without causal attention, one whole span covers the prompt.

    `resume`: continue after these tokens, as if this engine had sampled them. With `had_turn`, the
    request is admitted before those that have not been admitted anywhere.

    `tenant`: waiting requests are admitted in turn over their tenants. Cached prefixes are shared
    only among requests with equal `cache_salt`, at most 64 bytes.

    `markup`: control tokens that are part of the text of this answer, with their bytes. Other
    control tokens have no text.

    `prompt_logprobs` n: return the log-probability of each token of the prompt but the first, and
    of the n most likely tokens at its position. The whole prompt is computed, without the prefix
    cache.

    `grammar`: constrains the tokens of the answer. Before the step of a token that needs a mask
    (`Matcher.free`), the host must know all tokens before it, so that such steps do not overlap.

    `trace`: report its events to the engine's `TraceSink` (runtime/engine/tracing.py).

    `shift`: None: the answer ends when the context is full.

    `priority`: waiting requests with lower numbers are admitted first.
    """

    id: str
    prompt: tuple[int, ...]
    stop: StopRules
    sampling: SamplingParams = SamplingParams()
    spans: tuple[ImageSpan, ...] = ()
    pooling: Pooling | None = None
    images: tuple[RequestImage, ...] = ()
    resume: ResumeState | None = None
    tenant: str = ""
    cache_salt: bytes = b""
    markup: Mapping[int, bytes] = field(default_factory=dict)
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    trace: bool = False
    shift: ContextShift | None = None
    priority: int = 0

    @property
    def draws(self) -> bool:
        """Whether tokens are sampled."""
        return self.pooling is None and self.stop.max_tokens > 0

    @property
    def known(self) -> tuple[int, ...]:
        """The prompt, and the answer's tokens so far."""
        return self.prompt + self.resume.tokens if self.resume is not None else self.prompt


@dataclass(frozen=True, slots=True)
class Alternative:
    """One candidate token and its log-probability (natural logarithm)."""

    token: int
    logprob: float


class Sampled(NamedTuple):  # faster to create than a dataclass; each step creates many
    """The token that a step sampled for one sequence; log-probabilities only if requested."""

    token: int
    logprob: float | None = None
    top: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class DrawFailure:
    """No token could be sampled for one sequence; the others of the step are not affected.
    `by_request`: the request excludes all tokens, so that repeating it is useless."""

    reason: str
    by_request: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class LateMask:
    """No token was sampled for one sequence, since its grammar needs longer than the other
    sequences should wait. Its last position is computed again when the mask is `ready`. `mask`: for
    the runner."""

    ready: Callable[[], bool]
    mask: Any


@dataclass(frozen=True, slots=True)
class Pooled:
    """The vector of a prompt, little-endian float32."""

    vector: bytes


@dataclass(frozen=True, slots=True)
class Scored:
    """The log-probabilities of the prompt tokens that a chunk scores.

    `drawn`: the sampling result of the chunk; None if it does not sample."""

    prompt: tuple[Sampled, ...]
    drawn: Sampled | DrawFailure | LateMask | None = None


Outcome = Sampled | DrawFailure | Pooled | Scored
# The result of a chunk; None if it does not sample.
Result = Outcome | LateMask | None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts and durations of a request; durations in nanoseconds.

    `prompt_tokens` includes `cached_tokens`, those found in the prefix cache. `queue_ns` runs from
    arrival to the first step that computes for the request, `prompt_ns` from there to the first
    sampled token, `decode_ns` from there to the end. `completion_tokens` counts an end token and
    includes `thinking_tokens`, which the engine, that does not parse answers, leaves at 0.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_ns: int
    prompt_ns: int
    decode_ns: int
    thinking_tokens: int = 0


class Delta(NamedTuple):  # faster to create than a dataclass; each step creates many
    """The output of a request since its last delta; only the last delta has `finish`.

    `tokens`: all ids sampled since then, including the end token and those whose text is held back.
    `logprobs` belong to the text of this delta; text cut off by a stop string has none.
    `usage`: in the first delta the usage so far, in the last one the total. `prompt_logprobs`: of
    the prompt's tokens from the second on, if requested, in the first delta. `matched`: in the last
    delta, the stop string that has ended the answer, or what is reported of the end token.
    `error_class`: of the exception that `error` becomes.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Sampled, ...] = ()
    usage: Usage | None = None
    prompt_logprobs: tuple[Sampled, ...] = ()
    matched: str | int | None = None
    finish: FinishReason | None = None
    error: str | None = None
    vector: bytes | None = None  # of a pooled prompt, as in `Pooled`
    error_class: type[CaravanError] = GenerationFailedError

    def merged(self, later: "Delta") -> "Delta":
        """This delta and the next one as one."""
        return Delta(
            self.text + later.text,
            self.tokens + later.tokens,
            self.logprobs + later.logprobs,
            later.usage or self.usage,
            self.prompt_logprobs + later.prompt_logprobs,
            later.matched,
            later.finish,
            later.error,
            later.vector,
            later.error_class,
        )
