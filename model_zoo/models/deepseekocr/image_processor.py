"""Image processor of DeepSeek-OCR: tiles of a large image in the grid whose aspect ratio is nearest
to the image's, and the whole image on a square."""

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from model_zoo.images.equal_views import EqualViews
from model_zoo.images.normalise import STANDARD, Normalisation
from model_zoo.images.resize import Filter, Pixels, resized
from model_zoo.images.tiling import Grid, cut, nearest_grid, on_canvas
from model_zoo.layers.vision.patches import squares
from runtime.vision.encoder import ImageOutline

NO_TILES: Grid = (1, 1)  # of which the authors' code never makes a grid
GREY = 127
# Of patches along a side, those that become one row of features.
MERGED = 4


@dataclass(frozen=True, slots=True)
class DeepseekOCRProcessor:
    """pixels [patches, 3 * patch * patch]: the tiles in row-major order, then the whole image,
    centred on a grey square with this `side`.

    grid: rows and columns of tiles; (1, 1) for an image that is not cut, because it is no larger
    than a tile or, if `max_tiles` is 0, in any case. Each line of features, of the tiles or of the
    whole image, is followed by one row, and the last line of an image by another one.
    queries: features of a tile and of the whole image in DeepSeek-OCR 2, which are no lines.
    """

    side: int
    tile: int
    patch: int
    normalisation: Normalisation = STANDARD
    min_tiles: int = 2
    max_tiles: int = 9
    queries: tuple[int, int] | None = None

    @property
    def most_rows(self) -> int:
        return self._rows(NO_TILES) + self.max_tiles * self._rows_of(self.tile)

    @property
    def largest(self) -> ImageOutline:
        """An image as high as all tiles one below the other: no other grid has its aspect ratio,
        and none has more lines."""
        return self.outline(max(self.max_tiles, 1) * self.tile, self.tile)

    def outline(self, height: int, width: int) -> ImageOutline:
        grid = self._grid(height, width)
        patches = sum(views.patches for views in self.views(grid))
        return ImageOutline((patches, 3 * self.patch**2), grid, self._rows(grid))

    def views(self, grid: Grid) -> tuple[EqualViews, ...]:
        """The tiles, if there are any, and the whole image."""
        tile, side = self.tile // self.patch, self.side // self.patch
        tiles, whole = EqualViews(grid, tile, tile), EqualViews(NO_TILES, side, side)
        return (whole,) if grid == NO_TILES else (tiles, whole)

    def pixels(self, image: Pixels) -> Tensor:
        height, width, _ = image.shape
        grid, made = self._grid(height, width), [self._whole(image)[None]]
        if grid != NO_TILES:
            rows, columns = (count * self.tile for count in grid)
            made.insert(0, cut(resized(image, rows, columns, Filter.BICUBIC), *grid))
        patches = (squares(self.normalisation(views), self.patch).flatten(0, 1) for views in made)
        return torch.cat(list(patches))

    def within(self, rows: int) -> Self:
        """See `ScalableProcessor`."""
        most = (rows - self._rows(NO_TILES)) // self._rows_of(self.tile)
        return replace(self, max_tiles=min(self.max_tiles, most) if most >= self.min_tiles else 0)

    def _whole(self, image: Pixels) -> Pixels:
        """Rounded as by `ImageOps.pad` of Pillow, also where a half is left."""
        height, width, _ = image.shape
        high, wide = (
            max(round(min(length / other, 1.0) * self.side), 1)
            for length, other in ((height, width), (width, height))
        )
        top, left = (round((self.side - length) / 2) for length in (high, wide))
        small = resized(image, high, wide, Filter.BICUBIC)
        return on_canvas(small, self.side, self.side, top=top, left=left, level=GREY)

    def _grid(self, height: int, width: int) -> Grid:
        if max(height, width) <= self.tile or not self.max_tiles:
            return NO_TILES
        least, most = self.min_tiles, self.max_tiles
        return nearest_grid(height, width, side=self.tile, least=least, most=most)

    def _rows(self, grid: Grid) -> int:
        """Feature rows of an image with so many tiles."""
        whole, edge = self._rows_of(self.side) + 1, self.edge(self.tile)
        if grid == NO_TILES:
            return whole
        if self.queries is not None:
            return math.prod(grid) * self._rows_of(self.tile) + whole
        return grid[0] * edge * (grid[1] * edge + 1) + whole

    def _rows_of(self, side: int) -> int:
        """Those of a view alone, with the rows behind its lines."""
        if self.queries is not None:
            return self.queries[side == self.side]
        return self.edge(side) * (self.edge(side) + 1)

    def edge(self, side: int) -> int:
        """Rows of the first encoder along a side of a view of so many pixels."""
        return math.ceil(side // self.patch / MERGED)
