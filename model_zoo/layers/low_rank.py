"""Low-rank additions to matrices; Hu et al., "LoRA"."""

from dataclasses import dataclass, replace

from torch import Tensor

from runtime.kernels.activations import Activations
from runtime.kernels.experts import expert_products
from runtime.kernels.matmul import matmul
from runtime.quant.weight import Weight, gather_rows


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """Adds scale * up @ down to a matrix (out, in), which keeps its own blocks.

    down (rank, in), up (out, rank); of experts: down (experts, rank, in), up (experts, out, rank).
    """

    down: Weight
    up: Weight
    scale: float

    @property
    def row_elements(self) -> int:
        """Maximum number of temporary elements per row, copies in other types included."""
        return 2 * (self.down.shape[-2] + self.up.shape[-2])

    def rows(self, which: slice) -> "LowRank":
        """The addition to the selected rows of the matrix, or of each expert's; a view."""
        data = self.up.data[..., which, :]
        shape = (*data.shape[:-1], self.up.shape[-1])
        return replace(self, up=replace(self.up, data=data, shape=shape))

    def __call__(self, x: Activations) -> Tensor:
        """x [tokens, in] -> [tokens, out], in x's type."""
        return matmul(matmul(x, self.down).mul_(self.scale), self.up)

    def of_experts(self, x: Activations, chosen: Tensor, scale: Tensor | None) -> Tensor:
        """x [tokens, in] or [tokens, used, in] -> [tokens, used, out]; see `expert_products`."""
        inner = expert_products(x, self.down, chosen, scale=scale).mul_(self.scale)
        return expert_products(inner, self.up, chosen)


@dataclass(frozen=True, slots=True, eq=False)
class LowRankRows:
    """Adds scale * down @ up.T to an embedding (rows, hidden): down (rows, rank), up (hidden,
    rank)."""

    down: Weight
    up: Weight
    scale: float

    @property
    def row_elements(self) -> int:
        """Maximum number of temporary elements per row."""
        return 2 * sum(self.up.shape)

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [tokens] -> float32 [tokens, hidden]."""
        return matmul(gather_rows(self.down, ids).mul_(self.scale), self.up)


@dataclass(frozen=True, slots=True, eq=False)
class LowRankTypes:
    """Adds scale * up @ down to a small embedding (rows, hidden), such as that of token types. The
    pair is that of a matrix: down (rank, hidden), up (rows, rank)."""

    down: Weight
    up: Weight
    scale: float

    @property
    def row_elements(self) -> int:
        """Maximum number of temporary elements per row."""
        return 2 * sum(self.down.shape)

    def __call__(self, ids: Tensor) -> Tensor:
        """As `LowRankRows`."""
        return gather_rows(self.up, ids).mul_(self.scale) @ self.down.dequantize()
