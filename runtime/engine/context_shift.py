"""Which tokens leave a full context, so that an answer can go on.

The cut depends on the request only, so that another replica reaches the same context.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from runtime.engine.request import ContextShift, ImageSpan, SamplingParams

# `keep` may be at most this share of the context: the fewer tokens leave, the more often the
# others are computed again.
KEPT_SHARE = 0.75
# The number of tokens that leave is a multiple of a power of two, of this one in contexts from 512
# tokens on, so that pages of as many tokens move as a whole.
LARGEST_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class Cut:
    """The positions [begin, end) leave the context; those behind move down."""

    begin: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.begin

    def moved(self, position: int) -> int:
        """Where the token at `position`, or else the next one that stays, is afterwards."""
        return min(position, max(self.begin, position - self.count))

    def spans(self, spans: Sequence[ImageSpan]) -> tuple[ImageSpan, ...]:
        """Those of the images that stay."""
        stay = (s for s in spans if not self.begin <= s.start < self.end)
        return tuple(replace(span, start=self.moved(span.start)) for span in stay)

    def sampling(self, sampling: SamplingParams) -> SamplingParams:
        """The parameters, with positions and random numbers of the moved tokens. What is in front
        of the cut and what is behind it is no text."""
        return replace(
            sampling,
            counted_from=self.moved(sampling.counted_from),
            barred_until=max(0, sampling.barred_until - self.count),
            dropped=sampling.dropped + self.count,
            words_from=max(self.begin, self.moved(sampling.words_from)),
        )


def cut_of(shift: ContextShift, prompt_tokens: int, spans: Sequence[ImageSpan]) -> Cut:
    """What leaves a full context, as in Ollama: half of the tokens after the first `keep`.

    Images leave or stay whole. One that the first `keep` tokens contain a part of may leave. The
    last token, which follows the images, stays.
    """
    context = shift.context_tokens
    keep = prompt_tokens if shift.keep < 0 else shift.keep
    begin = min(keep, int(KEPT_SHARE * context), context - 2)
    images = _images(spans)
    begin = next((first for first, last in images if first < begin < last), begin)
    half = (context - begin) // 2
    multiple = _multiple(half)
    wanted = begin + half - half % multiple
    ends = range(wanted, context, multiple)
    end = next((end for end in ends if _outside(images, end)), None)
    if end is None:
        end = next(last for first, last in images if first < wanted < last)
    return Cut(begin, end)


def _multiple(half: int) -> int:
    """The largest power of two by which rounding costs less than a quarter."""
    return min(LARGEST_MULTIPLE, 1 << max(0, (half // 4).bit_length() - 1))


def _images(spans: Sequence[ImageSpan]) -> list[tuple[int, int]]:
    """First position and end of each image, which may have several spans."""
    images: list[tuple[int, int]] = []
    before: ImageSpan | None = None
    for span in spans:
        continues = (
            before is not None
            and span.digest == before.digest
            and span.first_row == before.first_row + before.length > 0
        )
        first = images.pop()[0] if continues else span.start
        images.append((first, span.end))
        before = span
    return images


def _outside(images: Sequence[tuple[int, int]], position: int) -> bool:
    return not any(first < position < last for first, last in images)
