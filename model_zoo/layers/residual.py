"""The residual stream between layers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from model_zoo.layers.norm import LayerNorm, RMSNorm
from runtime.kernels.activations import Activations
from runtime.kernels.pointwise import add_
from runtime.quant.weight import Compute


@dataclass(slots=True, eq=False)
class Residual:
    """x, or x * scale + y if there is a y; [tokens, hidden] each.

    The sum is computed once, in place of x, by the next norm if there is one; y is then released.
    """

    x: Tensor
    y: Tensor | None = None
    scale: float = 1.0

    def computed(self) -> Tensor:
        """[tokens, hidden]."""
        if self.y is not None:
            add_(self.x, self.y, scale=self.scale)
            self.y = None
        return self.x

    def normed(
        self, norm: RMSNorm | LayerNorm | None, rounding: Compute | None = None
    ) -> Activations:
        """The norm of the sum, for products with this rounding; without one, the sum itself."""
        if norm is None:
            return self.computed()
        y, self.y = self.y, None
        if rounding is not None:
            return norm.rounded(self.x, y, scale=self.scale, rounding=rounding)
        return norm(self.x) if y is None else norm.of_sum(self.x, y, scale=self.scale)

    def normed_states(self, norm: RMSNorm | LayerNorm) -> Tensor:
        """float32 [tokens, hidden]: the norm of the sum, which is in x's type."""
        y, self.y = self.y, None
        if y is None:
            return norm(self.x.float())
        return norm.of_sum(self.x, y, scale=self.scale, dtype=torch.float32)

    def to(self, device: torch.device) -> "Residual":
        """The residual on `device`; `self` if it is there already."""
        if self.x.device == device:
            return self
        return Residual(self.computed().to(device))
