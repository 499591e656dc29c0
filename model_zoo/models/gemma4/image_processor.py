"""Image processor of Gemma 4: keeps the aspect ratio and fills a budget of tokens."""

import math
from dataclasses import dataclass

from torch import Tensor

from model_zoo.images.normalise import UNCHANGED, Normalisation
from model_zoo.images.resize import Filter, Pixels, resized
from model_zoo.images.shapes import rectangles
from runtime.vision.encoder import ImageOutline


@dataclass(frozen=True, slots=True)
class Gemma4Processor:
    """pixels [3, height, width] in [0, 1]; both sides are multiples of `patch * pool`.

    grid: height and width of the rectangle of feature rows.
    """

    patch: int = 16
    pool: int = 3
    tokens: int = 280
    normalisation: Normalisation = UNCHANGED

    @property
    def most_rows(self) -> int:
        return self.tokens

    @property
    def largest(self) -> ImageOutline:
        unit = self.patch * self.pool
        filled = (self.outline(r * unit, c * unit) for r, c in rectangles(self.tokens))
        return max(filled, key=lambda outline: outline.rows)

    def outline(self, height: int, width: int) -> ImageOutline:
        unit = self.patch * self.pool
        rows, columns = grid = self._grid(height, width)
        return ImageOutline((3, rows * unit, columns * unit), grid, rows * columns)

    def pixels(self, image: Pixels) -> Tensor:
        _, height, width = self.outline(*image.shape[:2]).shape
        return self.normalisation(resized(image, height, width, Filter.BICUBIC))

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        unit = self.patch * self.pool
        scale = math.sqrt(self.tokens * unit**2 / (height * width))
        rows, columns = math.floor(scale * height / unit), math.floor(scale * width / unit)
        if not rows:
            rows, columns = 1, min(width // height, self.tokens)
        elif not columns:
            rows, columns = min(height // width, self.tokens), 1
        assert 0 < rows * columns <= self.tokens
        return rows, columns
