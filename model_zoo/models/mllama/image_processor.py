"""Image processor of Llama 3.2 Vision: tiles of the best canvas, in a fixed number of slots."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from model_zoo.images.normalise import CLIP, Normalisation
from model_zoo.images.prepared import ImageOutline, as_outlined, digest_of
from model_zoo.images.resize import Filter, resized
from model_zoo.images.tiling import best_grid, cut, fitting, on_canvas
from runtime.vision.encoder import PreparedImage


@dataclass(frozen=True, slots=True)
class MllamaProcessor:
    """pixels [max_tiles, 3, side, side] in row-major order, then zeros; grid: rows and columns of
    tiles.

    rows: feature rows of all slots, padding included.
    """

    side: int
    tile_rows: int
    max_tiles: int = 4
    resample: Filter = Filter.BILINEAR
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

    def prepare(self, image: NDArray[np.uint8], *, tower: bytes) -> PreparedImage:
        height, width, _ = image.shape
        outline = self.outline(height, width)
        grid = outline.grid
        small = resized(image, *fitting(height, width, grid=grid, side=self.side), self.resample)
        canvas = on_canvas(small, grid[0] * self.side, grid[1] * self.side)
        pixels = torch.zeros(outline.shape)
        pixels[: math.prod(grid)] = self.normalisation(cut(canvas, *grid))
        return as_outlined(outline, pixels, digest_of(image, self, tower))
