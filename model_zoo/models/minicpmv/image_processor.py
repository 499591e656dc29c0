"""Image processor of MiniCPM-V: an overview and slices, each in patches."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from model_zoo.images.normalise import STANDARD, Normalisation
from model_zoo.images.resize import Filter, Pixels, check_aspect, resized
from model_zoo.images.slicing import Slicing
from model_zoo.images.tiling import Size, cut, with_whole
from model_zoo.layers.vision.patches import squares
from runtime.vision.encoder import ImageOutline


@dataclass(frozen=True, slots=True)
class MiniCPMVProcessor:
    """pixels [patches, 3 * patch * patch]: the overview, then slices in row-major order.

    grid: height and width of the image, which determine its parts. part_rows: feature rows of a
    part; None if a part has one for each square unit of `slicing`.
    """

    slicing: Slicing
    patch: int
    part_rows: int | None
    normalisation: Normalisation = STANDARD

    @property
    def most_rows(self) -> int:
        """At least as many as images with more patches than `largest` might have."""
        if self.part_rows is None:
            return self.slicing.most_units
        rows = self.part_rows * with_whole(self.slicing.most)
        patches, _ = self.largest.shape
        return max(rows, -(-self.largest.rows * self.most_patches // patches))

    @property
    def most_patches(self) -> int:
        """A bound of the patches of an image."""
        return self.slicing.most_units * (self.slicing.unit // self.patch) ** 2

    @property
    def largest(self) -> ImageOutline:
        made = (self.outline(*size) for size in self.slicing.extremes)
        return max(made, key=lambda outline: outline.shape)

    def outline(self, height: int, width: int) -> ImageOutline:
        """Raises RequestError for an aspect ratio with which parts would be too large."""
        check_aspect(height, width)
        parts = self.slicing.parts(height, width)
        patches = math.prod(parts.overview) + parts.slices * math.prod(parts.slice_size)
        rows = self.rows(parts.overview) + parts.slices * self.rows(parts.slice_size)
        shape = (patches // self.patch**2, 3 * self.patch**2)
        return ImageOutline(shape, (height, width), rows)

    def rows(self, size: Size) -> int:
        """The feature rows of a part of that size."""
        return math.prod(size) // self.slicing.unit**2 if self.part_rows is None else self.part_rows

    def pixels(self, image: Pixels) -> Tensor:
        parts = self.slicing.parts(*image.shape[:2])
        overview = self._patches(resized(image, *parts.overview, Filter.BICUBIC)[None])
        if not parts.slices:
            return overview
        slices = cut(resized(image, *parts.refined, Filter.BICUBIC), *parts.grid)
        return torch.cat([overview, self._patches(slices)])

    def _patches(self, images: Pixels) -> Tensor:
        """images [parts, height, width, 3] -> [patches of all parts, 3 * patch * patch]."""
        return squares(self.normalisation(images), self.patch).flatten(0, 1)
