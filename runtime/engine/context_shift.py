"""Which tokens are dropped from a full context so that an answer can continue.

The cut depends on the request only, so that another replica reaches the same context.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from runtime.engine.request import ContextShift, ImageSpan, SamplingParams

# `keep` is limited to this share of the context: the fewer tokens are dropped, the more often the
# others are computed again.
KEPT_SHARE = 0.75
# The number of dropped tokens is a multiple of a power of two, of this one in contexts of at least
# 512 tokens, so that pages of that size move as a whole.
LARGEST_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class ContextCut:
    """The tokens at positions [begin, end) are dropped; later ones move down by `count`."""

    begin: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.begin

    def moved(self, position: int) -> int:
        """New position of the token at `position`; of the next kept one if it is dropped."""
        return min(position, max(self.begin, position - self.count))

    def spans(self, spans: Sequence[ImageSpan]) -> tuple[ImageSpan, ...]:
        """The spans of the images that are kept, at their new positions."""
        stay = (s for s in spans if not self.begin <= s.start < self.end)
        return tuple(replace(span, start=self.moved(span.start)) for span in stay)

    def sampling(self, sampling: SamplingParams) -> SamplingParams:
        """`sampling` with the positions after the cut and the same random numbers. `bad_words` do
        not match across the cut, because the tokens on its sides were not consecutive."""
        return replace(
            sampling,
            counted_from=self.moved(sampling.counted_from),
            barred_until=max(0, sampling.barred_until - self.count),
            dropped=sampling.dropped + self.count,
            words_from=max(self.begin, self.moved(sampling.words_from)),
        )


def cut_of(shift: ContextShift, prompt_tokens: int, spans: Sequence[ImageSpan]) -> ContextCut:
    """The cut of a full context, as in Ollama: half of the tokens after the first `keep`.

    Images are dropped or kept whole. An image that only partly lies within the first `keep` tokens
    may be dropped. The last token, which follows the images, is kept.
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
    return ContextCut(begin, end)


def _multiple(half: int) -> int:
    """The largest power of two, up to `LARGEST_MULTIPLE`, that is at most a quarter of `half`."""
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
