"""The projector of many vision models: two layers for concatenated rows."""

from collections.abc import Callable

import torch
from torch import Tensor

from model_zoo.layers.vision.image_attention import slabs
from runtime.kernels.pointwise import gelu_erf
from runtime.vision.encoder import Pause


class RowProjector:
    """Concatenates consecutive rows and applies two layers with an erf GELU between them, in slabs.

    See `LayerNeeds`, whose rows are the concatenated ones. widths: of concatenated rows, between
    the layers, and of the result. norm: of rows before they are concatenated or, if `late`, after.
    """

    kept_elements = 0

    def __init__(
        self,
        first: Callable[[Tensor], Tensor],
        second: Callable[[Tensor], Tensor],
        widths: tuple[int, int, int],
        norm: Callable[[Tensor], Tensor] | None,
        *,
        late: bool = False,
    ) -> None:
        self._first, self._second, self._norm, self._late = first, second, norm, late
        self._wide, between, self.width = widths
        self.row_elements = 3 * self._wide + 4 * between + 2 * self.width
        self.matrix_elements = between * max(self._wide, self.width)

    def __call__(self, x: Tensor, pause: Pause) -> Tensor:
        """x [rows, hidden] -> [concatenated rows, width]."""
        joined = x.view(-1, self._wide)
        projected = torch.empty(len(joined), self.width, dtype=x.dtype, device=x.device)
        for rows in slabs(joined, pause):
            normed = self._normed(joined[rows], x.shape[1])
            projected[rows] = self._second(gelu_erf(self._first(normed)))
        return projected

    def _normed(self, joined: Tensor, hidden: int) -> Tensor:
        if self._norm is None:
            return joined
        return self._norm(joined if self._late else joined.view(-1, hidden)).view(joined.shape)
