"""Image processor of Gemma 4: keeps the aspect ratio and fills a budget of tokens."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_zoo.images.normalise import UNCHANGED, Normalisation
from model_zoo.images.prepared import ImageOutline, as_outlined, digest_of
from model_zoo.images.resize import Filter, resized
from model_zoo.images.shapes import rectangles
from runtime.vision.encoder import PreparedImage


@dataclass(frozen=True, slots=True)
class Gemma4Processor:
    """pixels [3, height, width] in [0, 1]; both sides are multiples of `patch * pool`.

    grid: height and width of the rectangle of feature rows.
    """

    patch: int = 16
    pool: int = 3
    tokens: int = 280
    resample: Filter = Filter.BICUBIC
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

    def prepare(self, image: NDArray[np.uint8], *, tower: bytes) -> PreparedImage:
        outline = self.outline(*image.shape[:2])
        _, height, width = outline.shape
        pixels = self.normalisation(resized(image, height, width, self.resample))
        return as_outlined(outline, pixels, digest_of(image, self, tower))

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
