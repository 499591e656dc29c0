"""Attention windows: squares of the plane of an image whose rows attend to each other only."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from model_zoo.layers.vision.image_attention import AttentionSpan


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """The rows of a plane in the order of windows. order [rows]: the row of the plane at each
    place; windows of one shape are consecutive."""

    order: Tensor
    spans: tuple[AttentionSpan, ...]

    def arranged(self, x: Tensor) -> Tensor:
        """x [images, rows, ...] in row-major order of the plane -> in order of windows."""
        return x.index_select(1, self.order)

    def restored(self, x: Tensor) -> Tensor:
        """The inverse of `arranged`."""
        result = torch.empty_like(x)
        result[:, self.order] = x
        return result


def windows(rows: int, columns: int, size: int, *, each: int = 1, device: torch.device) -> Windows:
    """Windows of `size` x `size` from the top left, cut off at the right and bottom.

    each: number of rows per place of the plane.
    """
    plane = torch.arange(rows * columns, device=device).view(rows, columns)
    orders, spans, begin = [], [], 0
    for top, bottom in pairwise(_cuts(rows, size)):
        for left, right in pairwise(_cuts(columns, size)):
            part = plane[top:bottom, left:right]
            high, wide = min(size, bottom - top), min(size, right - left)
            grid = part.unflatten(1, (-1, wide)).unflatten(0, (-1, high))
            orders.append(grid.transpose(1, 2).flatten())
            end = begin + each * part.numel()
            spans.append(AttentionSpan(begin, end, begin, end, part.numel() // (high * wide)))
            begin = end
    return Windows(torch.cat(orders), tuple(spans))


def _cuts(length: int, size: int) -> list[int]:
    """The ends of whole windows and of the plane, each once."""
    return sorted({0, length - length % size, length})
