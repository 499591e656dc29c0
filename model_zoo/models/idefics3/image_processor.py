"""Image processor of Idefics 3 and SmolVLM: tiles of the scaled image, and the whole image."""

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from model_zoo.images.normalise import STANDARD, Normalisation
from model_zoo.images.resize import Filter, Pixels, resized
from model_zoo.images.tiling import Grid, Size, cut, most_tiles, with_whole
from runtime.vision.encoder import ImageOutline

MAX_EDGE = 4096


@dataclass(frozen=True, slots=True)
class Idefics3Processor:
    """pixels [tiles, 3, side, side] in row-major order; after several tiles, the stretched whole
    image follows as one more.

    grid: rows and columns of tiles, without the whole image. most_tiles: an image that has more
    tiles is scaled to a shorter edge.
    """

    side: int
    longest_edge: int
    tile_rows: int
    normalisation: Normalisation = STANDARD
    most_tiles: int | None = None

    @property
    def most_rows(self) -> int:
        tiles = self._most_across**2
        return with_whole(min(tiles, self.most_tiles or tiles)) * self.tile_rows

    @property
    def largest(self) -> ImageOutline:
        """Of images whose longer side has the most tiles."""
        across = self._most_across
        made = (self.outline(down * self.side, across * self.side) for down in range(1, across))
        square = self.outline(self.longest_edge, self.longest_edge)
        return max((square, *made), key=lambda outline: outline.rows)

    def outline(self, height: int, width: int) -> ImageOutline:
        _, grid = self._scaled(height, width)
        tiles = with_whole(math.prod(grid))
        return ImageOutline((tiles, 3, self.side, self.side), grid, tiles * self.tile_rows)

    def pixels(self, image: Pixels) -> Tensor:
        size, grid = self._scaled(*image.shape[:2])
        scaled = resized(image, *size, Filter.LANCZOS)
        rows, columns = grid
        stretched = resized(scaled, rows * self.side, columns * self.side, Filter.LANCZOS)
        pixels = self.normalisation(cut(stretched, *grid))
        if len(pixels) > 1:
            whole = resized(stretched, self.side, self.side, Filter.LANCZOS)
            pixels = torch.cat([pixels, self.normalisation(whole).unsqueeze(0)])
        return pixels

    def within(self, rows: int) -> Self:
        """See `ScalableProcessor`."""
        most = most_tiles(rows // self.tile_rows)
        return self if most >= self._most_across**2 else replace(self, most_tiles=most)

    @property
    def _most_across(self) -> int:
        edge = min(self.longest_edge, MAX_EDGE)
        edge += edge % 2  # one side is rounded up to an even length, even if both are equal
        return math.ceil(edge / self.side)

    def _scaled(self, height: int, width: int) -> tuple[Size, Grid]:
        """The size that an image is scaled to, and the grid of its tiles."""
        edge, across = self.longest_edge, self._most_across
        while True:
            size = scaled_to_edge(height, width, edge)
            grid = self._grid(*size)
            if self.most_tiles is None or math.prod(grid) <= self.most_tiles or across == 1:
                return size, grid
            across -= 1
            edge = across * self.side // 2 * 2  # so that the shorter side does not become longer

    def _grid(self, height: int, width: int) -> Grid:
        """The longer side in whole tiles, the shorter one by the aspect ratio."""
        aspect = width / height
        if width >= height:
            columns = math.ceil(width / self.side)
            return max(math.ceil(int(columns * self.side / aspect) / self.side), 1), columns
        rows = math.ceil(height / self.side)
        return rows, max(math.ceil(int(rows * self.side * aspect) / self.side), 1)


def scaled_to_edge(height: int, width: int, edge: int) -> tuple[int, int]:
    """The longer side becomes `edge`, the shorter one even; neither exceeds 4096."""
    aspect = width / height
    if width >= height:
        height, width = int(edge / aspect), edge
        height += height % 2
    else:
        height, width = edge, int(edge * aspect)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    aspect = width / height
    if width >= height and width > MAX_EDGE:
        height, width = int(MAX_EDGE / aspect), MAX_EDGE
    elif height > width and height > MAX_EDGE:
        height, width = MAX_EDGE, int(MAX_EDGE * aspect)
    return max(height, 1), max(width, 1)
