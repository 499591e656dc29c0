"""Image processor of several families: keeps the aspect ratio of images within bounds of area."""

from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.images.bounded_area import BoundedArea, Growth
from model_zoo.images.normalise import Normalisation
from model_zoo.images.resize import Filter, Pixels, check_aspect, resized
from model_zoo.images.tiling import patch_blocks
from model_zoo.layers.vision.vision_sizes import MAX_PATCH, MERGED_KEY, merged_side
from model_zoo.multimodal.image_settings import read_normalisation
from runtime.vision.encoder import ImageOutline


@dataclass(frozen=True, slots=True)
class BoundedProcessor:
    """pixels [patches, 3 * patch * patch], in the order channel, row, column.

    The merge * merge patches of one row of features are consecutive, and these groups are ordered
    row by row. grid: height and width of the rectangle of feature rows. grows: as in `BoundedArea`,
    with units of merge * patch pixels.
    """

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    normalisation: Normalisation
    grows: Growth | None = None

    @classmethod
    def read(
        cls,
        metadata: Metadata,
        areas: tuple[int, int],
        normalisation: Normalisation,
        *,
        patch: int | None = None,
        grows: Growth | None = None,
        merged_key: str = MERGED_KEY,
    ) -> Self:
        """The settings of a file with these bounds of area. normalisation, patch: where the file
        states none; without `patch` it must. merged_key: of `merge`."""
        key = "vision.patch_size"
        if patch is None:
            patch = metadata.require_size(key, at_most=MAX_PATCH)
        return cls(
            metadata.get_size(key, patch, at_most=MAX_PATCH),
            merged_side(metadata, merged_key),
            *areas,
            read_normalisation(metadata, normalisation),
            grows,
        )

    @property
    def most_rows(self) -> int:
        return self.area.most

    @property
    def largest(self) -> ImageOutline:
        return self.outline(*self.area.largest)

    def outline(self, height: int, width: int) -> ImageOutline:
        """Raises RequestError for an image more than 200 times as long as wide."""
        check_aspect(height, width)
        rows, columns = grid = self.area.grid(height, width)
        patches = rows * columns * self.merge**2
        return ImageOutline((patches, 3 * self.patch**2), grid, rows * columns)

    def pixels(self, image: Pixels) -> Tensor:
        rows, columns = self.area.grid(*image.shape[:2])
        unit = self.area.unit
        small = resized(image, rows * unit, columns * unit, Filter.BICUBIC)
        return patch_blocks(self.normalisation(small), patch=self.patch, block=self.merge)

    def within(self, rows: int) -> Self:
        """See `ScalableProcessor`."""
        most = max(rows * self.area.unit**2, self.min_pixels)
        return replace(self, max_pixels=min(self.max_pixels, most))

    @property
    def area(self) -> BoundedArea:
        return BoundedArea(
            self.patch * self.merge, self.min_pixels, self.max_pixels, grows=self.grows
        )
