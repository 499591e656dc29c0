"""Image processor of InternVL: tiles in the grid whose aspect ratio is nearest to the image's, and
the whole image."""

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from model_zoo.images.normalise import Normalisation
from model_zoo.images.resize import Filter, Pixels, resized
from model_zoo.images.tiling import Grid, cut, most_tiles, nearest_grid, with_whole
from runtime.vision.encoder import ImageOutline


@dataclass(frozen=True, slots=True)
class InternVLProcessor:
    """pixels [tiles, 3, side, side] in row-major order; after several tiles, the stretched whole
    image follows as one more.

    grid: rows and columns of tiles, without the whole image.
    """

    side: int
    tile_rows: int
    normalisation: Normalisation
    min_tiles: int = 1
    max_tiles: int = 12

    @property
    def most_rows(self) -> int:
        return with_whole(self.max_tiles) * self.tile_rows

    @property
    def largest(self) -> ImageOutline:
        """An image as wide as all tiles side by side: no other grid has its aspect ratio."""
        return self.outline(self.side, self.max_tiles * self.side)

    def outline(self, height: int, width: int) -> ImageOutline:
        grid = self._grid(height, width)
        tiles = with_whole(math.prod(grid))
        return ImageOutline((tiles, 3, self.side, self.side), grid, tiles * self.tile_rows)

    def pixels(self, image: Pixels) -> Tensor:
        rows, columns = grid = self._grid(*image.shape[:2])
        stretched = resized(image, rows * self.side, columns * self.side, Filter.BICUBIC)
        pixels = self.normalisation(cut(stretched, *grid))
        if len(pixels) > 1:
            whole = self.normalisation(resized(image, self.side, self.side, Filter.BICUBIC))
            pixels = torch.cat([pixels, whole.unsqueeze(0)])
        return pixels

    def within(self, rows: int) -> Self:
        """See `ScalableProcessor`."""
        most = max(most_tiles(rows // self.tile_rows), self.min_tiles)
        return replace(self, max_tiles=min(self.max_tiles, most))

    def _grid(self, height: int, width: int) -> Grid:
        least, most = self.min_tiles, self.max_tiles
        return nearest_grid(height, width, side=self.side, least=least, most=most)
