"""Image processor of MiniCPM-V: an overview and slices, each in patches."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from model_zoo.images.normalise import STANDARD, Normalisation
from model_zoo.images.prepared import ImageOutline
from model_zoo.images.resize import Filter, Pixels, check_aspect, resized
from model_zoo.images.slicing import Slicing
from model_zoo.images.tiling import Size, cut, with_whole
from model_zoo.layers.vision.patches import squares


@dataclass(frozen=True, slots=True)
class SlicingProcessor:
    """pixels [parts, patches, 3 * patch * patch]: the overview, then slices in row-major order.

    A part has fewer patches than there is place for; zeros follow. grid: height and width of the
    image, which determine its parts. part_rows: feature rows of a part; None if a part has one for
    each square unit of `slicing`.
    """

    slicing: Slicing
    patch: int
    part_rows: int | None
    normalisation: Normalisation = STANDARD

    @property
    def most_rows(self) -> int:
        if self.part_rows is None:
            return self.slicing.most_units
        return self.part_rows * with_whole(self.slicing.most)

    @property
    def largest(self) -> ImageOutline:
        """A line of squares as long as the largest number of slices, or the image with the most
        units."""
        if self.part_rows is None:
            made = (self.outline(*size) for size in self.slicing.extremes)
            return max(made, key=lambda outline: outline.rows)
        side = self.slicing.side
        return self.outline(side, side * self.slicing.most)

    @property
    def places(self) -> int:
        """The number of patches of the largest part."""
        return self.slicing.largest_area // self.patch**2

    def outline(self, height: int, width: int) -> ImageOutline:
        """Raises RequestError for an aspect ratio with which parts would be too large."""
        check_aspect(height, width)
        parts = self.slicing.parts(height, width)
        shape = (1 + parts.slices, self.places, 3 * self.patch**2)
        rows = self.rows(parts.overview) + parts.slices * self.rows(parts.slice_size)
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
        """images [parts, height, width, 3] -> [parts, places, 3 * patch * patch]."""
        patches = squares(self.normalisation(images), self.patch)
        missing = self.places - patches.shape[1]
        return torch.nn.functional.pad(patches, (0, 0, 0, missing))
