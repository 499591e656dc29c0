"""Image processor of Pixtral and Mistral 3: keeps the aspect ratio; the longest edge is bounded."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_zoo.images.normalise import CLIP, Normalisation
from model_zoo.images.prepared import ImageOutline, as_outlined, digest_of
from model_zoo.images.resize import Filter, resized
from runtime.vision.encoder import PreparedImage


@dataclass(frozen=True, slots=True)
class PixtralProcessor:
    """pixels [3, height, width], both sides multiples of `patch * merge`; grid: height and width of
    the rectangle of feature rows."""

    longest_edge: int
    patch: int
    merge: int = 1
    resample: Filter = Filter.BICUBIC
    normalisation: Normalisation = CLIP

    @property
    def most_rows(self) -> int:
        return math.ceil(self.longest_edge / (self.patch * self.merge)) ** 2

    @property
    def largest(self) -> ImageOutline:
        return self.outline(self.longest_edge, self.longest_edge)

    def outline(self, height: int, width: int) -> ImageOutline:
        unit = self.patch * self.merge
        rows, columns = grid = self._grid(height, width)
        return ImageOutline((3, rows * unit, columns * unit), grid, rows * columns)

    def prepare(self, image: NDArray[np.uint8], *, tower: bytes) -> PreparedImage:
        outline = self.outline(*image.shape[:2])
        _, height, width = outline.shape
        pixels = self.normalisation(resized(image, height, width, self.resample))
        return as_outlined(outline, pixels, digest_of(image, self, tower))

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """At least one row and one column; the reference fails for narrower images."""
        unit = self.patch * self.merge
        ratio = max(height / self.longest_edge, width / self.longest_edge)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        return max(math.ceil(height / unit), 1), max(math.ceil(width / unit), 1)
