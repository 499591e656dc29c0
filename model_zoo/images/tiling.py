"""Cutting images into tiles and patches, and choosing the grid."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Pixels = NDArray[np.uint8]
Grid = tuple[int, int]  # (rows, columns)
Size = tuple[int, int]  # (height, width)


def grids(most: int) -> list[Grid]:
    """All grids of at most `most` tiles, ordered by rows, then columns."""
    sides = range(1, most + 1)
    return [(rows, columns) for rows in sides for columns in sides if rows * columns <= most]


def with_whole(tiles: int) -> int:
    """Number of tiles, including the tile of the whole image that is added if there are several."""
    return tiles + (tiles > 1)


def most_tiles(parts: int) -> int:
    """The most tiles that are at most `parts` together with the tile of the whole image; at least
    one."""
    return max(parts - 1, 1)


def best_grid(height: int, width: int, *, side: int, most: int) -> Grid:
    """The grid of at most `most` tiles [side, side] that fits an image with the least enlargement.

    If the image must shrink for every grid, the grid with the least shrinking. Ties go to the grid
    with the fewest tiles.
    """

    def rank(grid: Grid) -> tuple[bool, float, int]:
        scale = min(grid[0] * side / height, grid[1] * side / width)
        return scale < 1, scale if scale >= 1 else -scale, math.prod(grid)

    return min(grids(most), key=rank)


def nearest_grid(height: int, width: int, *, side: int, least: int, most: int) -> Grid:
    """The grid of `least` to `most` tiles whose aspect ratio is nearest to an image's.

    Among equally near grids, the largest with less than twice the area of the image; if there is
    none, the one with the fewest tiles.
    """
    allowed = (grid for grid in grids(most) if math.prod(grid) >= least)
    best, smallest = (1, 1), float("inf")
    for rows, columns in sorted(allowed, key=lambda grid: (math.prod(grid), grid[1])):
        difference = abs(width / height - columns / rows)
        filled = height * width > 0.5 * side**2 * rows * columns
        if difference < smallest or (difference == smallest and filled):
            best, smallest = (rows, columns), difference
    return best


def fitting(height: int, width: int, *, grid: Grid, side: int) -> tuple[int, int]:
    """The size of an image on the canvas of `grid`: unchanged or shrunk, at least a tile."""
    high = min(max(height, side), grid[0] * side)
    wide = min(max(width, side), grid[1] * side)
    by_height, by_width = high / height, wide / width
    if by_width < by_height:
        return min(max(math.floor(height * by_width), 1), high), wide
    return high, min(max(math.floor(width * by_height), 1), wide)


def best_canvas(height: int, width: int, canvases: Sequence[Size]) -> Size:
    """The canvas (height, width) on which an image has the highest resolution; of several, the
    smallest."""

    def shown(canvas: Size) -> int:
        scale = min(canvas[1] / width, canvas[0] / height)
        return min(int(width * scale) * int(height * scale), width * height)

    return max(canvases, key=lambda each: (shown(each), shown(each) - math.prod(each)))


def unpadded(height: int, width: int, features: Size) -> Size:
    """Lines and columns of `features` covered by an image of that size, centred on its canvas."""
    lines, columns = features
    if width / height > columns / lines:
        new_lines = int(round(height * (columns / width), 7))
        lines -= (lines - new_lines) // 2 * 2
    else:
        new_columns = int(round(width * (lines / height), 7))
        columns -= (columns - new_columns) // 2 * 2
    return lines, columns


def canvas_grid(canvas: Size, side: int) -> Grid:
    """The grid of tiles with that side on a canvas."""
    return canvas[0] // side, canvas[1] // side


def canvas_rows(size: Size, grid: Grid, edge: int) -> int:
    """Number of feature rows of an image of that size.

    `edge`² of the whole image, the rows that it covers on the canvas of `grid` tiles, and one row
    after each line of the canvas.
    """
    lines, columns = unpadded(*size, (grid[0] * edge, grid[1] * edge))
    return edge**2 + lines * (columns + 1)


def on_canvas(
    image: Pixels, height: int, width: int, *, top: int = 0, left: int = 0, level: int = 0
) -> Pixels:
    """image [rows, columns, 3] -> [height, width, 3], with this level of grey around it."""
    canvas = np.full((height, width, 3), level, np.uint8)
    canvas[top : top + image.shape[0], left : left + image.shape[1]] = image
    return canvas


def cut(image: Pixels, rows: int, columns: int) -> Pixels:
    """image [rows * h, columns * w, 3] -> [rows * columns, h, w, 3], row by row."""
    height, width, channels = image.shape
    tiles = image.reshape(rows, height // rows, columns, width // columns, channels)
    return tiles.transpose(0, 2, 1, 3, 4).reshape(rows * columns, *tiles.shape[1::2], channels)


def patch_blocks(pixels: Tensor, *, patch: int, block: int) -> Tensor:
    """pixels [channels, height, width] -> [patches, channels * patch * patch].

    The patches of each square of `block` x `block` are consecutive; squares are in row-major order.
    """
    channels, height, width = pixels.shape
    side = patch * block
    blocks = pixels.view(channels, height // side, block, patch, width // side, block, patch)
    return blocks.permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, channels * patch**2)
