"""Image processor of Idefics 3 and SmolVLM: tiles of the scaled image, and the whole image."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from model_zoo.images.normalise import STANDARD, Normalisation
from model_zoo.images.resize import Filter, Pixels, resized
from model_zoo.images.tiling import cut, with_whole
from runtime.vision.encoder import ImageOutline

MAX_EDGE = 4096


@dataclass(frozen=True, slots=True)
class Idefics3Processor:
    """pixels [tiles, 3, side, side] in row-major order; after several tiles, the stretched whole
    image follows as one more.

    grid: rows and columns of tiles, without the whole image.
    """

    side: int
    longest_edge: int
    tile_rows: int
    normalisation: Normalisation = STANDARD

    @property
    def most_rows(self) -> int:
        edge = min(self.longest_edge, MAX_EDGE)
        edge += edge % 2  # one side is rounded up to an even length, even if both are equal
        return with_whole(math.ceil(edge / self.side) ** 2) * self.tile_rows

    @property
    def largest(self) -> ImageOutline:
        return self.outline(self.longest_edge, self.longest_edge)

    def outline(self, height: int, width: int) -> ImageOutline:
        grid = self._grid(*scaled_to_edge(height, width, self.longest_edge))
        tiles = with_whole(math.prod(grid))
        return ImageOutline((tiles, 3, self.side, self.side), grid, tiles * self.tile_rows)

    def pixels(self, image: Pixels) -> Tensor:
        rows, columns, _ = image.shape
        height, width = scaled_to_edge(rows, columns, self.longest_edge)
        scaled = resized(image, height, width, Filter.LANCZOS)
        rows, columns = grid = self._grid(height, width)
        stretched = resized(scaled, rows * self.side, columns * self.side, Filter.LANCZOS)
        pixels = self.normalisation(cut(stretched, *grid))
        if len(pixels) > 1:
            whole = resized(stretched, self.side, self.side, Filter.LANCZOS)
            pixels = torch.cat([pixels, self.normalisation(whole).unsqueeze(0)])
        return pixels

    def _grid(self, height: int, width: int) -> tuple[int, int]:
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
