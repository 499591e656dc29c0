"""Image processor of Pixtral, Mistral 3 and LightOnOCR: keeps the aspect ratio; the longest edge is
bounded."""

import math
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from model_zoo.images.normalise import CLIP, Normalisation
from model_zoo.images.resize import Filter, Pixels, resized
from runtime.vision.encoder import ImageOutline


@dataclass(frozen=True, slots=True)
class PixtralProcessor:
    """pixels [3, height, width], both sides multiples of `patch * merge`; grid: height and width of
    the rectangle of feature rows.

    Sides are rounded up to whole squares of merged patches, as in llama.cpp and, for Mistral 3, in
    `transformers`. LightOnOcrProcessor there rounds up to patches if its image processor states
    the patch size of the vision model, and then leaves out a last odd row or column of patches.
    """

    longest_edge: int
    patch: int
    merge: int = 1
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

    def pixels(self, image: Pixels) -> Tensor:
        _, height, width = self.outline(*image.shape[:2]).shape
        return self.normalisation(resized(image, height, width, Filter.BICUBIC))

    def within(self, rows: int) -> Self:
        """See `ScalableProcessor`. Squares have the most rows."""
        edge = max(math.isqrt(rows), 1) * self.patch * self.merge
        return replace(self, longest_edge=min(self.longest_edge, edge))

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """At least one row and one column; the reference fails for narrower images."""
        unit = self.patch * self.merge
        ratio = max(height / self.longest_edge, width / self.longest_edge)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        return max(math.ceil(height / unit), 1), max(math.ceil(width / unit), 1)
