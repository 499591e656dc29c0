"""LLaVA-NeXT: the whole image, and tiles of that resolution among several which wastes least."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from model_zoo.images.normalise import CLIP, Normalisation
from model_zoo.images.prepared import Outline, as_outlined, digest_of
from model_zoo.images.resize import Filter, resized
from model_zoo.images.tiles import Grid, cut, on_canvas
from runtime.vision import PreparedImage


@dataclass(frozen=True, slots=True)
class LlavaNextProcessor:
    """pixels [1 + tiles, 3, side, side]: the whole image, stretched, then tiles row by row.

    grid: of the tiles. `resolutions`: the canvases (height, width), multiples of `side`.
    `tile_edge`: a tile has so many features along each side. rows: those of the whole image,
    then those of the canvas without its padding, and one behind each of their lines.
    """

    side: int
    tile_edge: int
    resolutions: tuple[tuple[int, int], ...]
    resample: Filter = Filter.BICUBIC
    normalisation: Normalisation = CLIP

    @property
    def most_rows(self) -> int:
        grids = [(high // self.side, wide // self.side) for high, wide in self.resolutions]
        edge = self.tile_edge
        return edge**2 + max(rows * edge * (columns * edge + 1) for rows, columns in grids)

    def outline(self, height: int, width: int) -> Outline:
        high, wide = self._resolution(height, width)
        grid = high // self.side, wide // self.side
        features = grid[0] * self.tile_edge, grid[1] * self.tile_edge
        lines, length = unpadded(height, width, features)
        rows = self.tile_edge**2 + lines * (length + 1)
        return Outline((1 + math.prod(grid), 3, self.side, self.side), grid, rows)

    def prepare(self, image: NDArray[np.uint8], *, tower: bytes) -> PreparedImage:
        height, width, _ = image.shape
        outline = self.outline(height, width)
        high, wide = outline.grid[0] * self.side, outline.grid[1] * self.side
        small = resized(image, *_filling(height, width, high, wide), self.resample)
        top, left = (high - small.shape[0]) // 2, (wide - small.shape[1]) // 2
        tiles = cut(on_canvas(small, high, wide, top=top, left=left), *outline.grid)
        whole = resized(image, self.side, self.side, self.resample)
        pixels = torch.cat([self.normalisation(whole).unsqueeze(0), self.normalisation(tiles)])
        return as_outlined(outline, pixels, digest_of(image, self, tower))

    def _resolution(self, height: int, width: int) -> tuple[int, int]:
        """The one that shows most of the image, of equals the one with the least padding."""

        def shown(resolution: tuple[int, int]) -> int:
            scale = min(resolution[1] / width, resolution[0] / height)
            return min(int(width * scale) * int(height * scale), width * height)

        return max(self.resolutions, key=lambda each: (shown(each), shown(each) - math.prod(each)))


def unpadded(height: int, width: int, features: Grid) -> Grid:
    """Lines and columns of `features` on which an image of that size lies, amid its canvas."""
    lines, columns = features
    if width / height > columns / lines:
        new_lines = int(round(height * (columns / width), 7))
        lines -= (lines - new_lines) // 2 * 2
    else:
        new_columns = int(round(width * (lines / height), 7))
        columns -= (columns - new_columns) // 2 * 2
    return lines, columns


def _filling(height: int, width: int, high: int, wide: int) -> tuple[int, int]:
    by_height, by_width = high / height, wide / width
    if by_width < by_height:
        return min(math.ceil(height * by_width), high), wide
    return high, min(math.ceil(width * by_height), wide)
