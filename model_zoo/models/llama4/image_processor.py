"""Image processor of Llama 4: tiles of the best canvas, and the whole image as one more tile."""

from dataclasses import dataclass, replace
from math import prod
from typing import Self

import torch
from torch import Tensor

from model_zoo.images.normalise import STANDARD, Normalisation
from model_zoo.images.resize import Filter, Pixels, resized
from model_zoo.images.tiling import best_grid, cut, fitting, most_tiles, on_canvas, with_whole
from runtime.vision.encoder import ImageOutline


@dataclass(frozen=True, slots=True)
class Llama4Processor:
    """pixels [tiles, 3, side, side] in row-major order; after several tiles, the stretched whole
    image follows as one more.

    grid: rows and columns of tiles, without the whole image. Pixels are normalised in float32; the
    reference uses bfloat16.
    """

    side: int
    tile_rows: int
    max_tiles: int = 16
    normalisation: Normalisation = STANDARD

    @property
    def most_rows(self) -> int:
        return with_whole(self.max_tiles) * self.tile_rows

    @property
    def largest(self) -> ImageOutline:
        return self.outline(self.side, self.max_tiles * self.side)

    def outline(self, height: int, width: int) -> ImageOutline:
        grid = best_grid(height, width, side=self.side, most=self.max_tiles)
        tiles = with_whole(prod(grid))
        return ImageOutline((tiles, 3, self.side, self.side), grid, tiles * self.tile_rows)

    def pixels(self, image: Pixels) -> Tensor:
        height, width, _ = image.shape
        grid = self.outline(height, width).grid
        small = resized(image, *fitting(height, width, grid=grid, side=self.side), Filter.BILINEAR)
        canvas = on_canvas(small, grid[0] * self.side, grid[1] * self.side)
        pixels = self.normalisation(cut(canvas, *grid))
        if len(pixels) > 1:
            whole = self.normalisation(resized(image, self.side, self.side, Filter.BILINEAR))
            pixels = torch.cat([pixels, whole.unsqueeze(0)])
        return pixels

    def within(self, rows: int) -> Self:
        """See `ScalableProcessor`."""
        return replace(self, max_tiles=min(self.max_tiles, most_tiles(rows // self.tile_rows)))
