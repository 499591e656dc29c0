"""Image processor of LFM2-VL: the whole image within a bounded area, after tiles of a large one."""

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from model_zoo.images.bounded_area import BoundedArea
from model_zoo.images.normalise import STANDARD, Normalisation
from model_zoo.images.resize import MAX_ASPECT, Filter, Pixels, check_aspect, resized
from model_zoo.images.tiling import Grid, Size, cut, grids, nearest_grid, patch_blocks
from runtime.vision.encoder import ImageOutline


@dataclass(frozen=True, slots=True)
class ImageParts:
    """tiles: rows and columns of tiles. whole: rows and columns of features of the whole image.
    Both are (0, 0) where there are none. tile_edge: rows of features along a side of a tile."""

    tiles: Grid
    whole: Grid
    tile_edge: int

    @property
    def planes(self) -> tuple[tuple[int, Grid], ...]:
        """The number of parts of a size, and this size in rows of features, in order."""
        edge = self.tile_edge
        planes = (math.prod(self.tiles), (edge, edge)), (min(math.prod(self.whole), 1), self.whole)
        return tuple(plane for plane in planes if plane[0])

    @property
    def rows(self) -> int:
        return sum(count * math.prod(size) for count, size in self.planes)


@dataclass(frozen=True, slots=True)
class Lfm2Processor:
    """pixels [patches, 3 * patch * patch], in the order channel, row, column: those of the tiles in
    row-major order, then those of the whole image.

    The merge * merge patches of one row of features are consecutive, and these groups are ordered
    row by row. grid: height and width of the image, which determine its parts together with their
    number of rows. tile: side in pixels. An image is cut if it has more than `tolerance` times
    `max_rows` rows of features, but not if `max_tiles` is 1. thumbnail: whether the whole image
    follows the tiles.
    """

    patch: int
    merge: int
    min_rows: int
    max_rows: int
    tile: int
    min_tiles: int
    max_tiles: int
    tolerance: float
    thumbnail: bool = True
    resample: Filter = Filter.BILINEAR
    normalisation: Normalisation = STANDARD

    @property
    def most_rows(self) -> int:
        tiles = self.max_tiles * self._edge**2 if self.max_tiles > 1 else 0
        return tiles + self._area.most if self.thumbnail else max(tiles, self._area.most)

    @property
    def largest(self) -> ImageOutline:
        """That of the largest image that is not cut, and of images in the shape of each grid and of
        the longest strip, which are large enough to be cut."""
        sizes = [self._area.largest]
        for rows, columns in (*grids(self.max_tiles), (1, MAX_ASPECT)):
            units = 1 + math.isqrt(math.ceil(self.tolerance * self.max_rows / (rows * columns)))
            side = max(units, self._edge) * self._unit
            sizes.append((rows * side, columns * side))
        return max((self.outline(*size) for size in sizes), key=lambda outline: outline.rows)

    def outline(self, height: int, width: int) -> ImageOutline:
        """Raises RequestError for an image more than 200 times as long as wide."""
        check_aspect(height, width)
        rows = self.parts(height, width).rows
        shape = (rows * self.merge**2, 3 * self.patch**2)
        return ImageOutline(shape, (height, width), rows)

    def parts(self, height: int, width: int) -> ImageParts:
        whole = self._area.grid(height, width)
        if not self._is_cut(height, width):
            return ImageParts((0, 0), whole, self._edge)
        least, most = self.min_tiles, self.max_tiles
        tiles = nearest_grid(height, width, side=self.tile, least=least, most=most)
        return ImageParts(tiles, whole if self.thumbnail else (0, 0), self._edge)

    def parts_of(self, size: Size, rows: int) -> ImageParts:
        """The parts of a prepared image with so many rows, which may be for a shorter context. Of
        equally many tiles there is only one grid."""
        limits = *range(self.max_tiles, self.min_tiles - 1, -1), 1
        made = (replace(self, max_tiles=most) for most in limits)
        return next(parts for each in made if (parts := each.parts(*size)).rows == rows)

    def pixels(self, image: Pixels) -> Tensor:
        parts = self.parts(*image.shape[:2])
        made: list[Pixels] = []
        if math.prod(parts.tiles):
            high, wide = (side * self.tile for side in parts.tiles)
            made += [*cut(resized(image, high, wide, self.resample), *parts.tiles)]
        if math.prod(parts.whole):
            high, wide = (side * self._unit for side in parts.whole)
            made.append(resized(image, high, wide, self.resample))
        return torch.cat(
            [patch_blocks(self.normalisation(p), patch=self.patch, block=self.merge) for p in made]
        )

    def within(self, rows: int) -> Self:
        """See `ScalableProcessor`."""
        most = (rows - self._area.most * self.thumbnail) // self._edge**2
        return replace(self, max_tiles=min(self.max_tiles, most) if most >= self.min_tiles else 1)

    def _is_cut(self, height: int, width: int) -> bool:
        """A side that rounds to nothing counts as one patch."""
        unit = self._unit
        high, wide = (max(round(side / unit) * unit, self.patch) for side in (height, width))
        return self.max_tiles > 1 and high * wide > self.max_rows * unit**2 * self.tolerance

    @property
    def _unit(self) -> int:
        return self.patch * self.merge

    @property
    def _edge(self) -> int:
        return self.tile // self._unit

    @property
    def _area(self) -> BoundedArea:
        least, most = (rows * self._unit**2 for rows in (self.min_rows, self.max_rows))
        return BoundedArea(self._unit, least, most, shortest=1)
