"""Rows of an image in windows: squares of its plane that see themselves alone."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from model_zoo.layers.vision.attention import Sight


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """`order` [rows]: which row of the plane stands where, windows of one shape side by side."""

    order: Tensor
    sights: tuple[Sight, ...]

    def arranged(self, x: Tensor) -> Tensor:
        """x [images, rows, ...] of the plane, line by line -> in windows."""
        return x.index_select(1, self.order)

    def restored(self, x: Tensor) -> Tensor:
        """The inverse."""
        result = torch.empty_like(x)
        result[:, self.order] = x
        return result


def windows(rows: int, columns: int, size: int, *, each: int = 1, device: torch.device) -> Windows:
    """Windows of `size` x `size` from the top left, cut off at the right and at the bottom.

    `each`: how many rows of the sights a place of the plane has.
    """
    plane = torch.arange(rows * columns, device=device).view(rows, columns)
    orders, sights, begin = [], [], 0
    for top, bottom in pairwise(_cuts(rows, size)):
        for left, right in pairwise(_cuts(columns, size)):
            part = plane[top:bottom, left:right]
            high, wide = min(size, bottom - top), min(size, right - left)
            grid = part.unflatten(1, (-1, wide)).unflatten(0, (-1, high))
            orders.append(grid.transpose(1, 2).flatten())
            end = begin + each * part.numel()
            sights.append(Sight(begin, end, begin, end, part.numel() // (high * wide)))
            begin = end
    return Windows(torch.cat(orders), tuple(sights))


def _cuts(length: int, size: int) -> list[int]:
    """Where whole windows end, and the plane, each once."""
    return sorted({0, length - length % size, length})
