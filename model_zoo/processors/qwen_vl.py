"""Qwen2.5-VL and Qwen3-VL: the image in its own shape, its area bounded, as rows of patches."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from model_zoo.images.normalise import Normalisation
from model_zoo.images.prepared import Outline, as_outlined, digest_of
from model_zoo.images.resize import MAX_ASPECT, Filter, check_aspect, resized
from runtime.vision import PreparedImage


@dataclass(frozen=True, slots=True)
class QwenVLProcessor:
    """pixels [patches, 3 * frames * patch * patch]: channel, frame (each the same), row, column.

    Patches that are merged to one row of features, merge * merge of them, follow each other, and
    these blocks follow each other row by row. grid: the rectangle of merged rows.
    """

    patch: int
    merge: int
    frames: int
    min_pixels: int
    max_pixels: int
    normalisation: Normalisation
    resample: Filter = Filter.BICUBIC

    @property
    def most_rows(self) -> int:
        unit, least, most = self._unit, self.min_pixels, self.max_pixels
        edges = math.sqrt(least * MAX_ASPECT) + math.sqrt(least / MAX_ASPECT)
        enlarged = least + unit * edges + unit**2  # both sides rounded up
        thin = unit * math.sqrt(most * MAX_ASPECT)  # a side that would vanish keeps one unit
        return math.floor(max(most, enlarged, thin) / unit**2)

    def outline(self, height: int, width: int) -> Outline:
        """Raises RequestError for an image more than 200 times as long as wide."""
        check_aspect(height, width)
        rows, columns = grid = self._grid(height, width)
        patch = 3 * self.frames * self.patch**2
        return Outline((rows * columns * self.merge**2, patch), grid, rows * columns)

    def prepare(self, image: NDArray[np.uint8], *, tower: bytes) -> PreparedImage:
        outline = self.outline(*image.shape[:2])
        rows, columns = outline.grid
        small = resized(image, rows * self._unit, columns * self._unit, self.resample)
        pixels = self._patches(self.normalisation(small), outline.grid)
        return as_outlined(outline, pixels, digest_of(image, self, tower))

    @property
    def _unit(self) -> int:
        return self.patch * self.merge

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Nearest sides, both scaled where their area is out of bounds."""
        unit = self._unit
        rows, columns = round(height / unit), round(width / unit)
        area = rows * unit * columns * unit
        if area > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(math.floor(height / shrink / unit), 1)
            columns = max(math.floor(width / shrink / unit), 1)
        elif area < self.min_pixels:
            enlarge = math.sqrt(self.min_pixels / (height * width))
            rows = math.ceil(height * enlarge / unit)
            columns = math.ceil(width * enlarge / unit)
        return rows, columns

    def _patches(self, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
        rows, columns = grid
        blocks = pixels.view(3, rows, self.merge, self.patch, columns, self.merge, self.patch)
        ordered = blocks.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)
        framed = ordered.expand(-1, -1, -1, -1, -1, self.frames, -1, -1)
        return framed.reshape(rows * columns * self.merge**2, -1)
