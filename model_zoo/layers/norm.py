"""RMS and layer norms with weights of a file."""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.kernels.activations import Activations
from runtime.kernels.pointwise import add_norm_, layer_norm, rms_norm, rounded_norm_
from runtime.quant.weight import Compute


@dataclass(frozen=True, slots=True, eq=False)
class RMSNorm:
    """weight float32 [size], [heads, size] for x [tokens, heads, size], or None for ones.

    x [..., size] -> like x, computed in float32.
    """

    weight: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def of_sum(
        self, x: Tensor, y: Tensor, *, scale: float = 1.0, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The norm, in `dtype` or like x, of x * scale + y [tokens, size], which replaces x."""
        return add_norm_(x, y, self.weight, None, self.eps, scale=scale, dtype=dtype)

    def rounded(
        self, x: Tensor, y: Tensor | None, *, scale: float = 1.0, rounding: Compute
    ) -> Activations:
        """`of_sum`, or the norm of x without a y, for products with this rounding."""
        return rounded_norm_(x, y, self.weight, None, self.eps, scale=scale, rounding=rounding)


@dataclass(frozen=True, slots=True, eq=False)
class AcrossHeads:
    """One norm across all heads of a row. x [tokens, heads, size] -> like x."""

    norm: "RMSNorm | LayerNorm"

    def __call__(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(1)).view_as(x)


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """weight and bias float32 [size], or [heads, size] for x [tokens, heads, size].

    x [..., size] -> like x, computed in float32.
    """

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)

    def of_sum(
        self, x: Tensor, y: Tensor, *, scale: float = 1.0, dtype: torch.dtype | None = None
    ) -> Tensor:
        """As `RMSNorm.of_sum`."""
        return add_norm_(x, y, self.weight, self.bias, self.eps, scale=scale, dtype=dtype)

    def rounded(
        self, x: Tensor, y: Tensor | None, *, scale: float = 1.0, rounding: Compute
    ) -> Activations:
        """As `RMSNorm.rounded`."""
        return rounded_norm_(x, y, self.weight, self.bias, self.eps, scale=scale, rounding=rounding)
