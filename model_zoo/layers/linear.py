"""Products with the matrices of a file, quantised or not."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from model_zoo.layers.low_rank import LowRank, LowRankRows
from runtime.distributed.ranks import ALONE, Ranks, Split
from runtime.kernels.activations import Activations, unrounded
from runtime.kernels.embedding import embedding_rows
from runtime.kernels.matmul import gated_matmul, matmul, matmuls
from runtime.kernels.pointwise import Gate, add_
from runtime.quant.weight import Compute, Weight


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """weight (out, in); bias [out] or none; additions of adapters. x [tokens, in] -> [tokens, out],
    in x's type."""

    weight: Weight
    bias: Tensor | None = None
    added: tuple[LowRank, ...] = ()

    @property
    def rounding(self) -> Compute | None:
        """See `Weight.rounding`."""
        return self.weight.rounding

    def __call__(self, x: Activations) -> Tensor:
        return self.completed(matmul(x, self.weight), x)

    def completed(self, product: Tensor, x: Activations) -> Tensor:
        """Adds bias and additions, in place, to the product of x and the weight."""
        result = _with_added(product, x, self.added)
        return result if self.bias is None else add_(result, self.bias)


class Merging(Protocol):
    """x [tokens, this rank's inputs] -> [tokens, out] on all ranks.

    rounding: see `Weight.rounding`; None if ranks exchange x first. row_elements: temporary
    elements per row while ranks exchange it.
    """

    @property
    def rounding(self) -> Compute | None: ...

    @property
    def row_elements(self) -> int: ...

    def __call__(self, x: Activations) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class AllReduceLinear:
    """weight (out, this rank's inputs); bias [out], added once. Ranks sum their products."""

    weight: Weight
    bias: Tensor | None
    ranks: Ranks
    added: tuple[LowRank, ...] = ()

    @property
    def row_elements(self) -> int:
        return 0 if self.ranks.size == 1 else (self.ranks.size + 1) * self.weight.shape[0]

    @property
    def rounding(self) -> Compute | None:
        return self.weight.rounding

    def __call__(self, x: Activations) -> Tensor:
        result = self.ranks.all_reduce(_with_added(matmul(x, self.weight), x, self.added))
        return result if self.bias is None else add_(result, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class AllGatherLinear:
    """weight (this rank's outputs, in) with its bias. Ranks gather their inputs, divided by `ins`,
    and their outputs, divided by `outs`. operands: see `matmul`."""

    weight: Weight
    bias: Tensor | None
    outs: Split
    ins: Split | None
    ranks: Ranks
    added: tuple[LowRank, ...] = ()
    operands: torch.dtype | None = None

    @property
    def row_elements(self) -> int:
        if self.ranks.size == 1:
            return 0
        widths = self.outs.widths if self.ins is None else (*self.ins.widths, *self.outs.widths)
        return 2 * sum(widths)

    @property
    def added_elements(self) -> int:
        """Temporary elements per row while the additions are computed."""
        return max((each.row_elements for each in self.added), default=0)

    @property
    def rounding(self) -> Compute | None:
        return self.weight.rounding if self.ins is None else None

    def __call__(self, x: Activations) -> Tensor:
        if self.ins is not None:
            x = self.ranks.all_gather(unrounded(x), self.ins.widths)
        product = matmul(x, self.weight, operands=self.operands)
        result = _with_added(product, x, self.added)
        if self.bias is not None:
            add_(result, self.bias)
        return self.ranks.all_gather(result, self.outs.widths)


@dataclass(frozen=True, slots=True, eq=False)
class FusedLinear:
    """Linears with the same input, each with the rows of one or more matrices.

    `sizes`: sizes of the matrices of each part; `added`: additions of adapters to each result.
    x [tokens, in] -> one [tokens, size] for each matrix, possibly strided views.
    """

    parts: tuple[Linear, ...]
    sizes: tuple[tuple[int, ...], ...]
    added: tuple[tuple[LowRank, ...], ...]

    @classmethod
    def of(
        cls,
        weights: Iterable[tuple[Weight, int]],
        sizes: Sequence[int],
        biases: Sequence[Tensor | None],
        added: tuple[tuple[LowRank, ...], ...],
    ) -> "FusedLinear":
        """Weights that each have the rows of so many matrices; sizes and biases of each matrix."""
        parts, divided, begin = [], [], 0
        for weight, count in weights:
            some = slice(begin, begin + count)
            divided.append(tuple(sizes[some]))
            parts.append(Linear(weight, _joined_bias(biases[some], divided[-1])))
            begin += count
        return cls(tuple(parts), tuple(divided), added)

    @property
    def width(self) -> int:
        """Total width of all results."""
        return sum(map(sum, self.sizes))

    @property
    def rounding(self) -> Compute | None:
        """That of the first weight that has one; see `Weight.rounding`."""
        return next((part.rounding for part in self.parts if part.rounding is not None), None)

    def __call__(self, x: Activations) -> tuple[Tensor, ...]:
        products = matmuls(x, [part.weight for part in self.parts])
        results = list[Tensor]()
        for part, product, sizes in zip(self.parts, products, self.sizes, strict=True):
            result = part.completed(product, x)
            results += [result] if len(sizes) == 1 else result.split(sizes, dim=1)
        return tuple(
            _with_added(result, x, added) for result, added in zip(results, self.added, strict=True)
        )

    def gated(self, x: Activations, gate: Gate) -> Tensor:
        """`gate` of the two results, which have the same size: [tokens, size]."""
        part = self.parts[0]
        if len(self.parts) > 1 or part.bias is not None or part.added or any(self.added):
            return gate(*self(x))
        first, second = self.sizes[0]
        assert first == second, self.sizes
        return gated_matmul(x, part.weight, gate)


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """weight (rows, hidden); `held`: the rows of this rank, None for all; additions of adapters.

    ids [tokens] -> [tokens, hidden], in `dtype`.
    """

    weight: Weight
    dtype: torch.dtype
    held: Split | None = None
    ranks: Ranks = field(default=ALONE)
    added: tuple[LowRankRows, ...] = ()

    @property
    def rows(self) -> int:
        return self.weight.shape[0] if self.held is None else self.held.parts[-1][1]

    def __call__(self, ids: Tensor) -> Tensor:
        foreign = None
        if self.held is not None:
            inside = ids - self.held.begin
            foreign = (inside < 0) | (inside >= self.held.count)
            ids = inside.masked_fill(foreign, 0)
        rows = embedding_rows(self.weight, ids, torch.float32 if self.added else self.dtype)
        for each in self.added:
            rows = rows.add_(each(ids))
        rows = rows.to(self.dtype)
        if foreign is None:
            return rows
        return self.ranks.all_reduce(rows.masked_fill_(foreign[:, None], 0.0))


def _with_added(result: Tensor, x: Activations, added: Iterable[LowRank]) -> Tensor:
    """`result` with the additions of adapters, changed in place."""
    for each in added:
        result.add_(each(x))
    return result


def _joined_bias(biases: Sequence[Tensor | None], sizes: tuple[int, ...]) -> Tensor | None:
    present = [bias for bias in biases if bias is not None]
    if not present:
        return None
    joined = present[0].new_zeros(sum(sizes))
    for part, bias in zip(joined.split(sizes), biases, strict=True):
        if bias is not None:
            part.copy_(bias)
    return joined
