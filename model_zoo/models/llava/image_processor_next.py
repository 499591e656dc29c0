"""Image processor of LLaVA 1.6: the whole image, and tiles of the canvas with the least padding."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from model_zoo.images.normalise import CLIP, Normalisation
from model_zoo.images.resize import Filter, Pixels, resized
from model_zoo.images.tiling import (
    Grid,
    Size,
    best_canvas,
    canvas_grid,
    canvas_rows,
    cut,
    on_canvas,
)
from runtime.vision.encoder import ImageOutline


@dataclass(frozen=True, slots=True)
class LlavaNextProcessor:
    """pixels [1 + tiles, 3, side, side]: the stretched whole image, then tiles in row-major order.

    grid: height and width of the image, which determine its canvas and its place on it. canvases:
    (height, width), multiples of `side`. tile_edge: features along a side of a tile. rows: those of
    the whole image, then those of the canvas without padding, each line followed by one row.
    """

    side: int
    tile_edge: int
    canvases: tuple[Size, ...]
    normalisation: Normalisation = CLIP

    @property
    def most_rows(self) -> int:
        return max(self._rows(canvas, canvas) for canvas in self.canvases)

    @property
    def largest(self) -> ImageOutline:
        """An image that fills a canvas with the most tiles.

        A canvas with fewer tiles may have more rows, since each line of features has one row more.
        """
        filled = (self.outline(*canvas) for canvas in self.canvases)
        return max(filled, key=lambda outline: (outline.shape[0], outline.rows))

    def outline(self, height: int, width: int) -> ImageOutline:
        canvas = best_canvas(height, width, self.canvases)
        tiles = math.prod(self._grid(canvas))
        rows = self._rows((height, width), canvas)
        return ImageOutline((1 + tiles, 3, self.side, self.side), (height, width), rows)

    def pixels(self, image: Pixels) -> Tensor:
        height, width, _ = image.shape
        high, wide = canvas = best_canvas(height, width, self.canvases)
        small = resized(image, *_filling(height, width, high, wide), Filter.BICUBIC)
        top, left = (high - small.shape[0]) // 2, (wide - small.shape[1]) // 2
        tiles = cut(on_canvas(small, high, wide, top=top, left=left), *self._grid(canvas))
        whole = resized(image, self.side, self.side, Filter.BICUBIC)
        return torch.cat([self.normalisation(whole).unsqueeze(0), self.normalisation(tiles)])

    def _grid(self, canvas: Size) -> Grid:
        return canvas_grid(canvas, self.side)

    def _rows(self, size: Size, canvas: Size) -> int:
        return canvas_rows(size, self._grid(canvas), self.tile_edge)


def _filling(height: int, width: int, high: int, wide: int) -> tuple[int, int]:
    by_height, by_width = high / height, wide / width
    if by_width < by_height:
        return min(math.ceil(height * by_width), high), wide
    return high, min(math.ceil(width * by_height), wide)
