"""Image processor of Llama 3.2 Vision: tiles of the best canvas, in a fixed number of slots."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from model_zoo.images.normalise import CLIP, Normalisation
from model_zoo.images.resize import Filter, Pixels, resized
from model_zoo.images.tiling import best_grid, cut, fitting, on_canvas
from runtime.vision.encoder import ImageOutline


@dataclass(frozen=True, slots=True)
class MllamaProcessor:
    """pixels [max_tiles, 3, side, side] in row-major order, then zeros; grid: rows and columns of
    tiles.

    rows: feature rows of all slots, padding included.
    """

    side: int
    tile_rows: int
    max_tiles: int = 4
    normalisation: Normalisation = CLIP

    @property
    def most_rows(self) -> int:
        return self.max_tiles * self.tile_rows

    @property
    def largest(self) -> ImageOutline:
        return self.outline(self.side, self.max_tiles * self.side)

    def outline(self, height: int, width: int) -> ImageOutline:
        grid = best_grid(height, width, side=self.side, most=self.max_tiles)
        return ImageOutline((self.max_tiles, 3, self.side, self.side), grid, self.most_rows)

    def pixels(self, image: Pixels) -> Tensor:
        height, width, _ = image.shape
        outline = self.outline(height, width)
        grid = outline.grid
        small = resized(image, *fitting(height, width, grid=grid, side=self.side), Filter.BILINEAR)
        canvas = on_canvas(small, grid[0] * self.side, grid[1] * self.side)
        pixels = torch.zeros(outline.shape)
        pixels[: math.prod(grid)] = self.normalisation(cut(canvas, *grid))
        return pixels
