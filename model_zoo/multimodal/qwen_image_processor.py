"""Image processor of Qwen-VL and GLM-V models: keeps the aspect ratio within a bounded area."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from model_zoo.images.normalise import Normalisation
from model_zoo.images.prepared import ImageOutline
from model_zoo.images.resize import MAX_ASPECT, Filter, Pixels, check_aspect, resized
from model_zoo.images.shapes import rectangles


@dataclass(frozen=True, slots=True)
class QwenVLProcessor:
    """pixels [patches, 3 * patch * patch], in the order channel, row, column.

    The merge * merge patches of one row of features are consecutive, and these groups are ordered
    row by row. grid: height and width of the rectangle of feature rows. grows: whether an image
    with a side of less than one unit (merge * patch pixels) is enlarged to one unit before the
    bounds apply.
    """

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    normalisation: Normalisation
    grows: bool = False

    @property
    def most_rows(self) -> int:
        """Computed with integers, so that rounding cannot make it too small."""
        # A side shrinks to one unit at the least, so a strip may exceed `max_pixels`.
        strip = math.isqrt(MAX_ASPECT * self.max_pixels) // self._unit
        enlarged = max(rows for rows, _ in self._enlarged())
        return max(self.max_pixels // self._unit**2, strip, enlarged)

    @property
    def largest(self) -> ImageOutline:
        """The largest of a rectangle that fills the area, the longest strip and an enlarged
        image."""
        unit = self._unit
        filling = rectangles(max(self.max_pixels // unit**2, 1))
        sizes = [(high * unit, wide * unit) for high, wide in filling if wide <= MAX_ASPECT * high]
        sizes += [(unit, MAX_ASPECT * unit), *(size for _, size in self._enlarged())]
        return max((self.outline(*size) for size in sizes), key=lambda outline: outline.rows)

    def outline(self, height: int, width: int) -> ImageOutline:
        """Raises RequestError for an image more than 200 times as long as wide."""
        check_aspect(height, width)
        rows, columns = grid = self._grid(height, width)
        patches = rows * columns * self.merge**2
        return ImageOutline((patches, 3 * self.patch**2), grid, rows * columns)

    def pixels(self, image: Pixels) -> Tensor:
        rows, columns = grid = self._grid(*image.shape[:2])
        small = resized(image, rows * self._unit, columns * self._unit, Filter.BICUBIC)
        return self._patches(self.normalisation(small), grid)

    @property
    def _unit(self) -> int:
        return self.patch * self.merge

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """The nearest sides in units; both are scaled if their area is out of bounds."""
        unit = self._unit
        if self.grows and min(height, width) < unit:
            scale = max(unit / height, unit / width)
            height, width = (max(int(side * scale), unit) for side in (height, width))
        rows, columns = round(height / unit), round(width / unit)
        area = rows * unit * columns * unit
        if area > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(math.floor(height / shrink / unit), 1)
            columns = max(math.floor(width / shrink / unit), 1)
        elif area < self.min_pixels:
            enlarge = math.sqrt(self.min_pixels / (height * width))
            rows = math.ceil(height * enlarge / unit)
            columns = math.ceil(width * enlarge / unit)
        return rows, columns

    def _enlarged(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """For images that are enlarged to `min_pixels`: for each possible number of units along the
        shorter side, a bound of the rows, and (height, width) of an image near that bound.

        Both sides are rounded up. A side of n units was longer than n - 1 units, so the other was
        shorter than the area divided by n - 1 units. The maximum aspect ratio bounds the shorter
        side.
        """
        area, unit = self.min_pixels, self._unit
        fewest = math.isqrt(area // (MAX_ASPECT * unit**2)) + 1
        yield fewest * (math.isqrt(MAX_ASPECT * area) // unit + 1), (1, MAX_ASPECT)
        for units in range(fewest + 1, math.isqrt(area // unit**2) + 2):
            exceeded = (units - 1) * unit
            half = exceeded // 2 + 1
            size = half, max((area * half - 1) // exceeded**2, 1)
            yield units * (area // (exceeded * unit) + 1), size

    def _patches(self, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
        rows, columns = grid
        blocks = pixels.view(3, rows, self.merge, self.patch, columns, self.merge, self.patch)
        ordered = blocks.permute(1, 4, 2, 5, 0, 3, 6)
        return ordered.reshape(rows * columns * self.merge**2, -1)
