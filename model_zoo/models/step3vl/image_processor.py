"""Image processor of Step 3 VL: the whole image, and square windows of a large or long one."""

import math
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from model_zoo.images.equal_views import EqualViews
from model_zoo.images.normalise import CLIP, Normalisation
from model_zoo.images.resize import MAX_ASPECT, Filter, Pixels, check_aspect, resized
from model_zoo.images.shapes import rectangles
from model_zoo.images.shrinking import shrunk
from model_zoo.images.tiling import Grid, Size, cut, on_canvas
from model_zoo.layers.vision.patches import squares
from runtime.vision.encoder import ImageOutline

NO_WINDOWS: Grid = (0, 0)
# How many patches along a side become one row of features.
MERGED = 4
# The side of a window, which no file states, relative to that of the whole image, in rows of
# features: 504 to 728 pixels.
SHARE = 9 / 13
# A strip below this width in pixels and above this aspect ratio becomes a square.
NARROW, LONG = 32, 4
# Above this aspect ratio, an image is cut although it fits the side.
OBLONG = 1.5
# A rest at the end becomes another window if it is longer than this part of one.
LEFT = 0.2


@dataclass(frozen=True, slots=True)
class Windows:
    """The grid of windows, their side in pixels, and the size to which the image is scaled before
    they are cut. What lies beyond the image is black."""

    grid: Grid
    side: int
    size: Size


@dataclass(frozen=True, slots=True)
class Step3VLProcessor:
    """pixels [patches, 3 * patch * patch]: the windows in row-major order, then the stretched whole
    image; the patches of each are in row-major order.

    side, tile: the sides to which the whole image and each window are scaled. grid: rows and
    columns of windows, (0, 0) if there are none. longest_edge: larger images are scaled down first.
    most_windows: images with more windows are scaled down first. Each view is scaled in 8 bits, as
    in `transformers`; the authors' code scales after normalisation.
    """

    side: int
    tile: int
    patch: int
    longest_edge: int = 3024
    normalisation: Normalisation = CLIP
    most_windows: int | None = None

    @property
    def most_rows(self) -> int:
        return self.rows_of(self.side) + self._bound * self.rows_of(self.tile)

    @property
    def largest(self) -> ImageOutline:
        """Sizes of strips and rectangles with nearly the most windows that an image can have."""
        strips = [NARROW, math.ceil(self.longest_edge / MAX_ASPECT), self.tile]
        sizes = [(short, short * min(self._bound, MAX_ASPECT)) for short in strips]
        grids = rectangles(self._bound)
        sizes += [(rows * self.tile, columns * self.tile) for rows, columns in grids]
        sizes.append((self.longest_edge, self.longest_edge))
        possible = (size for size in sizes if max(size) <= MAX_ASPECT * min(size))
        return max((self.outline(*size) for size in possible), key=lambda outline: outline.rows)

    def outline(self, height: int, width: int) -> ImageOutline:
        """Raises RequestError for an image more than 200 times as long as wide."""
        check_aspect(height, width)
        grid = self._windows(height, width).grid
        rows = self.rows_of(self.side) + math.prod(grid) * self.rows_of(self.tile)
        patches = sum(each.patches for each in self.views(grid))
        return ImageOutline((patches, 3 * self.patch**2), grid, rows)

    def views(self, grid: Grid) -> tuple[EqualViews, ...]:
        """The windows, if there are any, and the whole image."""
        tile, side = self.tile // self.patch, self.side // self.patch
        windows, whole = EqualViews(grid, tile, tile), EqualViews((1, 1), side, side)
        return (windows, whole) if grid != NO_WINDOWS else (whole,)

    def pixels(self, image: Pixels) -> Tensor:
        windows = self._windows(*image.shape[:2])
        image = self._scaled(image)
        made = [resized(image, self.side, self.side, Filter.BILINEAR)[None]]
        if windows.grid != NO_WINDOWS:
            rows, columns = windows.grid
            stretched = resized(image, *windows.size, Filter.BILINEAR)
            canvas = on_canvas(stretched, rows * windows.side, columns * windows.side)
            tiles = cut(canvas, rows, columns)
            small = [resized(each, self.tile, self.tile, Filter.BILINEAR) for each in tiles]
            made.insert(0, np.stack(small))
        patches = (squares(self.normalisation(views), self.patch).flatten(0, 1) for views in made)
        return torch.cat(list(patches))

    def within(self, rows: int) -> Self:
        """See `ScalableProcessor`."""
        most = max(rows - self.rows_of(self.side), 0) // self.rows_of(self.tile)
        return self if most >= self._bound else replace(self, most_windows=most)

    def rows_of(self, side: int) -> int:
        """Rows of features of a view with that side in pixels."""
        return math.ceil(side // self.patch / MERGED) ** 2

    @property
    def _bound(self) -> int:
        """Windows of the largest square, and of the longest strip, whose shorter side is rounded
        down when it is scaled."""
        square = self._count(self.longest_edge, self.tile) ** 2
        strip = self.longest_edge // max((self.longest_edge - 1) // MAX_ASPECT, 1) + 1
        most = max(square, strip)
        return most if self.most_windows is None else min(most, self.most_windows)

    def _scaled(self, image: Pixels) -> Pixels:
        """The image, scaled down to the longest edge; a narrow strip at the top left of a black
        square."""
        height, width, _ = image.shape
        square = _squared(height, width)
        size = self._within_edge(*square)
        if square == (height, width):
            return resized(image, *size, Filter.BILINEAR)
        scale = size[0] / square[0]
        high, wide = (max(round(length * scale), 1) for length in (height, width))
        return on_canvas(resized(image, high, wide, Filter.BILINEAR), *size)

    def _within_edge(self, height: int, width: int) -> Size:
        longest = max(height, width)
        if longest <= self.longest_edge:
            return height, width
        scale = self.longest_edge / longest
        return max(int(height * scale), 1), max(int(width * scale), 1)

    def _windows(self, height: int, width: int) -> Windows:
        def count(height: int, width: int) -> int:
            return math.prod(self._windows_of(height, width).grid)

        return self._windows_of(*shrunk(height, width, count, self.most_windows))

    def _windows_of(self, height: int, width: int) -> Windows:
        size = self._within_edge(*_squared(height, width))
        side = self._window_side(*size)
        if side is None:
            return Windows(NO_WINDOWS, 0, (0, 0))
        rows, columns = grid = self._count(size[0], side), self._count(size[1], side)
        high, wide = (
            count * side if length >= side else length
            for count, length in zip(grid, size, strict=True)
        )
        return Windows((rows, columns), side, (high, wide))

    def _window_side(self, height: int, width: int) -> int | None:
        """The side of the windows of an image in pixels; None if it is not cut."""
        shorter, longer = sorted((height, width))
        if longer <= self.side:
            return shorter if longer / shorter > OBLONG else None
        return min(shorter, self.tile) if longer / shorter > LONG else self.tile

    @staticmethod
    def _count(length: int, window: int) -> int:
        """The number of windows along a side, at least one."""
        return max(length // window + (length % window > LEFT * window), 1)


def _squared(height: int, width: int) -> Size:
    shorter, longer = sorted((height, width))
    is_strip = shorter < NARROW and longer > LONG * shorter
    return (longer, longer) if is_strip else (height, width)


def tile_side(side: int, patch: int) -> int:
    """The side of a window in pixels, for a whole image of side `side`."""
    unit = MERGED * patch
    return max(round(side // unit * SHARE), 1) * unit
