"""Steps of no request, which an engine computes before any other to find what they lack.

All rows write to the page that belongs to no sequence; slots are loaded before use.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass

from runtime.engine.request import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_TOP_LOGPROBS,
    GenerationRequest,
    ImageSpan,
    Pooling,
    SamplingParams,
    StopRules,
)
from runtime.engine.sequence import Sequence
from runtime.engine.step_plan import Chunk, SlotLoad, StepPlan
from runtime.worker.input_preparer import StepLimits
from runtime.worker.sampler import path_examples

_EVERY_OPTION = SamplingParams(
    top_k=0,
    top_p=0.5,
    repeat_penalty=1.1,
    repeat_last_n=None,
    logprobs=MAX_TOP_LOGPROBS,
    logit_bias=((0, 1.0),),
    typical_p=0.5,
    dry_multiplier=1.0,
    dry_base=100.0,
    allowed=b"\xff" * 4,
    bad_words=((1,) * MAX_BAD_WORD_TOKENS,) * MAX_BAD_WORDS,
)
_PLAIN = SamplingParams()


@dataclass(frozen=True, slots=True)
class ScratchStep:
    """`rows` rows in `draws` chunks with these options; with every option, they have a grammar."""

    rows: int
    draws: int
    sampling: SamplingParams = _PLAIN


@dataclass(frozen=True, slots=True)
class ScratchModel:
    """What a sequence is for a model, see `DecoderModel`; `sees`: whether it has an image."""

    causal: bool
    generates: bool
    sees: bool = False


def scratch_steps(
    limits: StepLimits, *, most_recorded: int, most_span: int, compiles: bool
) -> Iterator[ScratchStep]:
    """The largest step, the largest prompt that is recorded, the largest decode step and, last, the
    smallest one.

    Of decode steps with at most `most_recorded` rows and prompts with at most `most_span`, which
    are recorded, the largest come first, because the others reuse their memory. `compiles`:
    kernels are compiled at first use, for sizes between powers of two, so the steps use all that
    serving uses. The smallest step draws without options, so that its draw is recorded too.
    """
    draws = limits.draws
    yield ScratchStep(limits.step_tokens, draws, _EVERY_OPTION)
    if most_span > 1:
        yield ScratchStep(most_span, 1)
    largest = min(draws, most_recorded)
    yield ScratchStep(largest, largest, _EVERY_OPTION)
    if compiles:
        yield from (ScratchStep(rows, rows) for rows in _sizes(draws) if rows != largest)
        chunks = min(draws, limits.slots)  # a prompt and, if possible, rows of other sequences
        sizes = (rows for rows in _sizes(limits.step_tokens) if rows > 2)
        yield from (ScratchStep(rows, min(rows // 2, chunks)) for rows in sizes)
        yield from (ScratchStep(1, 1, sampling) for sampling in path_examples())
    yield ScratchStep(1, 1)


def _sizes(most: int) -> list[int]:
    """The powers of two below `most`, and `most`, the largest first."""
    return [most, *(1 << power for power in reversed(range((most - 1).bit_length())))]


def scratch_plan(step: ScratchStep, limits: StepLimits, model: ScratchModel) -> StepPlan:
    """Chunks in consecutive slots that end at the end of the context. They have one row each; the
    remaining rows lengthen the first chunks."""
    room = limits.context_tokens - 1  # leaves one position for the last sampled token
    left = step.rows - step.draws
    chunks, loads = [], []
    for number in range(step.draws):
        slot = number % limits.slots
        length = min(room, 1 + left)
        left -= length - 1
        start = room - length if model.causal else 0
        sequence = _sequence(slot, start, length, step.sampling, model)
        known = (0,) * length
        chunks.append(Chunk(sequence, 0, slot, start, length, known, False, True))
        if slot == number:
            loads.append(SlotLoad(slot, (0,) * room, step.sampling))
    return StepPlan(tuple(chunks), (), tuple(loads))


def _sequence(
    slot: int, start: int, length: int, sampling: SamplingParams, model: ScratchModel
) -> Sequence:
    """A sequence that samples if the model generates text and is pooled otherwise. Without causal
    attention its prompt is one whole span."""
    image = _ScratchImage()
    span = ImageSpan(start, length, whole=not model.causal, digest=image.digest)
    request = GenerationRequest(
        f"warm-up-{slot}",
        (0,) * length,
        StopRules(1),
        sampling,
        spans=() if model.causal and not model.sees else (span,),
        pooling=None if model.generates else Pooling.MEAN,
        images=(image,) if model.sees else (),
        grammar=_AnyToken() if sampling is _EVERY_OPTION else None,
    )
    return Sequence(request, [0] * length, pending=1)


@dataclass(frozen=True, slots=True)
class _ScratchImage:
    digest: bytes = b""
    rows: int = 0


class _AnyToken:
    """A grammar that allows everything, and its own matcher."""

    free = 0  # so that masks are computed

    def matcher(self) -> "_AnyToken":
        return self

    def accept(self, token: int) -> None:
        pass

    def allowed(self, mask: memoryview) -> None:
        mask.cast("B")[:] = b"\xff" * mask.nbytes

    def acceptable(self, tokens: Several[int]) -> int:
        return len(tokens)

    def look_ahead(self, tokens: Several[int], masks: Several[memoryview]) -> None:
        for mask in masks:
            self.allowed(mask)
