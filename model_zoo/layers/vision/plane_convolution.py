"""Convolutions over square views whose cells are rows of features."""

from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.vision.image_attention import slabs
from model_zoo.layers.vision.patches import row_convolution
from runtime.vision.encoder import Pause


class PlaneConvolution:
    """A convolution of `side` x `side` cells, with zeros around a view so that a stride of 1 keeps
    its size; `stride` divides it, rounded up. Its matrix is in float32.

    out: elements of a row of the result. row_elements, kept_elements: temporary elements per row of
    the result in a slab, and per row of the batch.
    """

    def __init__(
        self, w: TensorScope, name: str, *, hidden: int, side: int, stride: int = 1
    ) -> None:
        self._side, self._stride = side, stride
        self.out = (w.shape(name) or (1,))[0]
        self._product = row_convolution(w, name, hidden=hidden, out=self.out, side=side)
        self.row_elements = 3 * side**2 * hidden + 2 * self.out
        self.kept_elements = hidden + self.out + 6 * side**2
        self.matrix_elements = side**2 * hidden * self.out

    def __call__(self, x: Tensor, views: int, pause: Pause) -> Tensor:
        """x [views * rows, hidden] -> [views * rows of the result, out]."""
        count = len(x) // views
        near = self._neighbours(isqrt(count), x.device)
        starts = torch.arange(0, len(x), count, device=x.device)
        each = torch.where(near < count, near + starts[:, None, None], len(x)).flatten(0, 1)
        padded = torch.cat([x, torch.zeros_like(x[:1])])
        made = x.new_empty(len(each), self.out)
        for rows in slabs(made, pause):
            made[rows] = self._product(padded[each[rows]].flatten(1))
        return made

    def _neighbours(self, across: int, device: torch.device) -> Tensor:
        """int64 [rows of the result of a view, side * side]: the rows under the convolution, or one
        behind all rows where there are zeros."""
        around = self._side // 2
        rows = torch.arange(across * across, device=device).view(across, across)
        plane = F.pad(rows, (around,) * 4, value=across * across)
        parts = plane.unfold(0, self._side, self._stride).unfold(1, self._side, self._stride)
        return parts.flatten(2).flatten(0, 1)
