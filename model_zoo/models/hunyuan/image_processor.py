"""Image processor of HunyuanOCR and Hunyuan-VL: Qwen's, with rows for the ends of lines."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isqrt
from typing import Self

from torch import Tensor

from model_zoo.images.resize import MAX_ASPECT, Pixels
from model_zoo.multimodal.bounded_processor import BoundedProcessor
from runtime.vision.encoder import ImageOutline


@dataclass(frozen=True, slots=True)
class HunyuanProcessor:
    """pixels: as of `BoundedProcessor`. The features of an image have a row for its begin, those of
    each line with one for its end, and one for the end of the image."""

    patches: BoundedProcessor

    @property
    def most_rows(self) -> int:
        """Of the grids with each number of columns, the one with the most lines; and as many as
        images with more patches than `largest` might have."""
        most, largest = self.patches.most_rows, self.largest
        rows = (
            _rows(min(most // columns, MAX_ASPECT * (columns + 1)), columns)
            for columns in range(1, isqrt(most) + 1)
        )
        lines, columns = largest.grid
        return max(*rows, -(-largest.rows * most // (lines * columns)))

    @property
    def largest(self) -> ImageOutline:
        sizes = [*self.patches.area.extremes(), *self._narrowest()]
        upright = [self.outline(max(size), min(size)) for size in sizes]
        return max(upright, key=lambda outline: outline.rows)

    def outline(self, height: int, width: int) -> ImageOutline:
        """Raises as `BoundedProcessor.outline`."""
        found = self.patches.outline(height, width)
        return replace(found, rows=_rows(*found.grid))

    def pixels(self, image: Pixels) -> Tensor:
        return self.patches.pixels(image)

    def within(self, rows: int) -> Self:
        """See `ScalableProcessor`. Squares of so many rows have a column for the ends of lines."""
        side = isqrt(rows)
        return replace(self, patches=self.patches.within(max(rows - side - 2, 1)))

    def _narrowest(self) -> Iterator[tuple[int, int]]:
        """(height, width) of the highest images of each number of columns."""
        unit = self.patches.area.unit
        most = max(self.patches.max_pixels // unit**2, 1)
        for columns in range(1, isqrt(most) + 1):
            width = columns * unit + (unit - 1) // 2  # rounded down to whole columns
            yield min(most // columns * unit, MAX_ASPECT * width), width


def _rows(lines: int, columns: int) -> int:
    return 1 + lines * (columns + 1) + 1
