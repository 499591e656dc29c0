"""Image processor of MiniCPM-V: an overview and slices, each in patches."""

import math
from dataclasses import dataclass, replace
from itertools import islice
from typing import Self

import torch
from torch import Tensor

from model_zoo.images.normalise import STANDARD, Normalisation
from model_zoo.images.resize import Filter, Pixels, check_aspect, resized
from model_zoo.images.shrinking import shrunk
from model_zoo.images.slicing import Slicing
from model_zoo.images.tiling import Size, cut, with_whole
from model_zoo.layers.vision.patches import squares
from runtime.vision.encoder import ImageOutline

# Of the extreme sizes, the share that is tried where each is scaled down first.
LIMITED_STEP = 8


@dataclass(frozen=True, slots=True)
class MiniCPMVProcessor:
    """pixels [patches, 3 * patch * patch]: the overview, then slices in row-major order.

    grid: height and width of the image, which determine its parts; less than they are if it would
    have more than `limit` rows of features. part_rows: feature rows of a part; None if a part has
    one for each square unit of `slicing`.
    """

    slicing: Slicing
    patch: int
    part_rows: int | None
    normalisation: Normalisation = STANDARD
    limit: int | None = None

    @property
    def most_rows(self) -> int:
        """At least as many as images with more patches than `largest` might have."""
        if self.part_rows is None:
            return min(self.slicing.most_units, self.limit or self.slicing.most_units)
        rows = self.part_rows * self._most_parts
        patches, _ = self.largest.shape
        return max(rows, -(-self.largest.rows * self.most_patches // patches))

    @property
    def most_patches(self) -> int:
        """A bound of the patches of an image."""
        units = self.slicing.most_units
        if self.limit is not None:
            largest = self.slicing.largest_area // self.slicing.unit**2
            limited = self.limit if self.part_rows is None else self._most_parts * largest
            units = min(units, limited)
        return units * (self.slicing.unit // self.patch) ** 2

    @property
    def largest(self) -> ImageOutline:
        sizes = islice(self.slicing.extremes, 0, None, 1 if self.limit is None else LIMITED_STEP)
        made = (self.outline(*size) for size in sizes)
        return max(made, key=lambda outline: outline.shape)

    def outline(self, height: int, width: int) -> ImageOutline:
        """Raises RequestError for an aspect ratio with which parts would be too large."""
        check_aspect(height, width)
        size = shrunk(height, width, self._rows, self.limit)
        parts = self.slicing.parts(*size)
        patches = math.prod(parts.overview) + parts.slices * math.prod(parts.slice_size)
        shape = (patches // self.patch**2, 3 * self.patch**2)
        return ImageOutline(shape, size, self._rows(*size))

    def rows(self, size: Size) -> int:
        """The feature rows of a part of that size."""
        return math.prod(size) // self.slicing.unit**2 if self.part_rows is None else self.part_rows

    def pixels(self, image: Pixels) -> Tensor:
        height, width, _ = image.shape
        parts = self.slicing.parts(*shrunk(height, width, self._rows, self.limit))
        overview = self._patches(resized(image, *parts.overview, Filter.BICUBIC)[None])
        if not parts.slices:
            return overview
        slices = cut(resized(image, *parts.refined, Filter.BICUBIC), *parts.grid)
        return torch.cat([overview, self._patches(slices)])

    def within(self, rows: int) -> Self:
        """See `ScalableProcessor`. Every image may be one part."""
        whole = self.part_rows or self.slicing.largest_area // self.slicing.unit**2
        return self if rows >= self.most_rows else replace(self, limit=max(rows, whole))

    def _rows(self, height: int, width: int) -> int:
        parts = self.slicing.parts(height, width)
        return self.rows(parts.overview) + parts.slices * self.rows(parts.slice_size)

    @property
    def _most_parts(self) -> int:
        most = with_whole(self.slicing.most)
        if self.limit is None or self.part_rows is None:
            return most
        return min(most, self.limit // self.part_rows)

    def _patches(self, images: Pixels) -> Tensor:
        """images [parts, height, width, 3] -> [patches of all parts, 3 * patch * patch]."""
        return squares(self.normalisation(images), self.patch).flatten(0, 1)
