"""Image processor of Muse Glimmer: the grid nearest to the aspect of an image, up to a number of
rows."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Self

from torch import Tensor

from model_zoo.images.normalise import STANDARD, Normalisation
from model_zoo.images.resize import MAX_ASPECT, Filter, Pixels, check_aspect, resized
from model_zoo.images.shapes import rectangles
from model_zoo.images.tiling import Size
from runtime.vision.encoder import ImageOutline

MOST_ROWS = 4096


@dataclass(frozen=True, slots=True)
class MuseProcessor:
    """pixels [3, height, width], both sides multiples of `unit`, the side of a row of features in
    pixels; grid: height and width of the rectangle of feature rows. rows: their largest number,
    which only images may exceed that are one row high or wide."""

    unit: int
    rows: int = MOST_ROWS
    normalisation: Normalisation = STANDARD

    @property
    def most_rows(self) -> int:
        return max(self.rows, math.isqrt(MAX_ASPECT * self.rows) + 1)

    @property
    def largest(self) -> ImageOutline:
        grids = [size for size in rectangles(self.rows) if size[1] <= MAX_ASPECT * size[0]]
        grids.append((1, MAX_ASPECT))
        outlines = (self.outline(*(side * self.unit for side in grid)) for grid in grids)
        return max(outlines, key=lambda outline: outline.rows)

    def outline(self, height: int, width: int) -> ImageOutline:
        """Raises RequestError for an image more than 200 times as long as wide."""
        check_aspect(height, width)
        grid = self._grid(height, width)
        high, wide = (side * self.unit for side in grid)
        return ImageOutline((3, high, wide), grid, math.prod(grid))

    def pixels(self, image: Pixels) -> Tensor:
        _, height, width = self.outline(*image.shape[:2]).shape
        return self.normalisation(resized(image, height, width, Filter.LANCZOS))

    def within(self, rows: int) -> Self:
        """See `ScalableProcessor`."""
        return replace(self, rows=min(self.rows, max(rows, 1)))

    def _grid(self, height: int, width: int) -> Size:
        high, wide = height / self.unit, width / self.unit
        if high * wide > self.rows:
            ratio = wide / high
            high = (self.rows / ratio) ** 0.5
            wide = high * ratio
        near = [grid for grid in _around(high, wide) if 1 <= math.prod(grid) <= self.rows]
        if not near:
            return max(1, round(high)), max(1, round(wide))
        return min(near, key=lambda grid: abs(grid[0] / grid[1] - height / width))


def _around(high: float, wide: float) -> Iterator[Size]:
    """The grids whose sides are these rounded down or up."""
    return product({math.floor(high), math.ceil(high)}, {math.floor(wide), math.ceil(wide)})
