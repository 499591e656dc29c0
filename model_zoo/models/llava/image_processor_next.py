"""Image processor of LLaVA 1.6: the whole image, and tiles of the canvas with the least padding."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from model_zoo.images.normalise import CLIP, Normalisation
from model_zoo.images.resize import Filter, Pixels, resized
from model_zoo.images.shrinking import shrunk
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

    grid: height and width of the image, which determine its canvas and its place on it; less than
    they are if it would have more than `limit` rows of features. canvases: (height, width),
    multiples of `side`. tile_edge: features along a side of a tile. rows: those of the whole image,
    then those of the canvas without padding, each line followed by one row.
    """

    side: int
    tile_edge: int
    canvases: tuple[Size, ...]
    normalisation: Normalisation = CLIP
    limit: int | None = None

    @property
    def most_rows(self) -> int:
        """At least as many as images with more tiles than `largest` might have."""
        most = max(self._filled(canvas) for canvas in self.canvases)
        largest = self.largest
        squares = -(-largest.rows * self.most_squares // largest.shape[0])
        return max(min(most, self.limit or most), squares)

    @property
    def most_squares(self) -> int:
        """A bound of the tiles of an image, the whole image included."""
        return 1 + max(math.prod(self._grid(canvas)) for canvas in self.canvases)

    @property
    def largest(self) -> ImageOutline:
        """An image on a canvas with the most tiles that fills it, or as much as `limit` permits.

        A canvas with fewer tiles may have more rows, since each line of features has one row more.
        """
        made = (self.outline(*size) for size in self._extremes())
        return max(made, key=lambda outline: (outline.shape[0], outline.rows))

    def outline(self, height: int, width: int) -> ImageOutline:
        size = shrunk(height, width, self._rows, self.limit)
        tiles = math.prod(self._grid(best_canvas(*size, self.canvases)))
        return ImageOutline((1 + tiles, 3, self.side, self.side), size, self._rows(*size))

    def pixels(self, image: Pixels) -> Tensor:
        rows, columns, _ = image.shape
        height, width = shrunk(rows, columns, self._rows, self.limit)
        high, wide = canvas = best_canvas(height, width, self.canvases)
        small = resized(image, *_filling(height, width, high, wide), Filter.BICUBIC)
        top, left = (high - small.shape[0]) // 2, (wide - small.shape[1]) // 2
        tiles = cut(on_canvas(small, high, wide, top=top, left=left), *self._grid(canvas))
        whole = resized(image, self.side, self.side, Filter.BICUBIC)
        return torch.cat([self.normalisation(whole).unsqueeze(0), self.normalisation(tiles)])

    def _grid(self, canvas: Size) -> Grid:
        return canvas_grid(canvas, self.side)

    def within(self, rows: int) -> Self:
        """See `ScalableProcessor`. Small images are on the smallest canvas."""
        if rows >= self.most_rows:
            return self
        return replace(self, limit=max(rows, self._filled(min(self.canvases, key=math.prod))))

    def _rows(self, height: int, width: int) -> int:
        canvas = best_canvas(height, width, self.canvases)
        return canvas_rows((height, width), self._grid(canvas), self.tile_edge)

    def _filled(self, canvas: Size) -> int:
        return canvas_rows(canvas, self._grid(canvas), self.tile_edge)

    def _extremes(self) -> Iterator[Size]:
        """Of images that fill a canvas and, if rows are limited, of strips along its sides."""
        for high, wide in self.canvases:
            yield high, wide
            for part in (2, 4, 8, 16) if self.limit is not None else ():
                yield max(high // part, 1), wide
                yield high, max(wide // part, 1)


def _filling(height: int, width: int, high: int, wide: int) -> tuple[int, int]:
    by_height, by_width = high / height, wide / width
    if by_width < by_height:
        return min(math.ceil(height * by_width), high), wide
    return high, min(math.ceil(width * by_height), wide)
