"""Products with a file's matrices: whether these are quantised is the kernels' business."""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.kernels.matmul import matmul
from runtime.quant import Weight, gather_rows


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """weight (out, in); bias [out] or none. x [tokens, in] -> [tokens, out], in x's type."""

    weight: Weight
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        result = matmul(x, self.weight)
        return result if self.bias is None else result.add_(self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class FusedLinear:
    """Linears of the same input, in one product where `parts` is a single one with all rows.

    x [tokens, in] -> one [tokens, size] for each of `sizes`, perhaps strided.
    """

    parts: tuple[Linear, ...]
    sizes: tuple[int, ...]

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        if len(self.parts) == 1:
            return self.parts[0](x).split(self.sizes, dim=1)
        return tuple(part(x) for part in self.parts)


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """weight (rows, hidden). ids [tokens] -> [tokens, hidden], in `dtype`."""

    weight: Weight
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.weight.shape[0]

    def __call__(self, ids: Tensor) -> Tensor:
        return gather_rows(self.weight, ids).to(self.dtype)
