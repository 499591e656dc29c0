"""Products with the matrices of a file, quantised or not."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from model_zoo.layers.low_rank import LowRank, LowRankRows, LowRankTypes
from runtime.distributed.ranks import ALONE, Ranks, Split
from runtime.kernels.activations import Activations, unrounded
from runtime.kernels.embedding import embedding_rows
from runtime.kernels.matmul import gated_matmul, matmul, matmuls
from runtime.kernels.pointwise import Gate, add_, mul
from runtime.quant.weight import Compute, Weight


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """weight (out, in); factors float32 [out] of the product, bias [out], or none; additions of
    adapters. operands: see `matmul`. x [tokens, in] -> [tokens, out], in x's type."""

    weight: Weight
    bias: Tensor | None = None
    added: tuple[LowRank, ...] = ()
    factors: Tensor | None = None
    operands: torch.dtype | None = None

    @property
    def rounding(self) -> Compute | None:
        """See `Weight.rounding`."""
        return self.weight.rounding

    @property
    def added_elements(self) -> int:
        """Temporary elements per row while the additions are computed."""
        return max((each.row_elements for each in self.added), default=0)

    def __call__(self, x: Activations) -> Tensor:
        wide = for_factors(x, self.factors)
        return self.completed(matmul(wide, self.weight, operands=self.operands), x)

    def completed(self, product: Tensor, x: Activations) -> Tensor:
        """The product of x, or of `for_factors`, and the weight, times the factors, with bias and
        additions; possibly the same tensor, changed."""
        if self.factors is not None:
            product = mul(product, self.factors.expand_as(product))
        result = _with_added(product.to(unrounded(x).dtype), x, self.added)
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
    """The weight of `linear`, which has no bias, is (out, this rank's inputs); bias [out], added
    once. Ranks sum their products."""

    linear: Linear
    bias: Tensor | None
    ranks: Ranks

    @property
    def row_elements(self) -> int:
        return 0 if self.ranks.size == 1 else (self.ranks.size + 1) * self.linear.weight.shape[0]

    @property
    def rounding(self) -> Compute | None:
        return self.linear.rounding

    def __call__(self, x: Activations) -> Tensor:
        result = self.ranks.all_reduce(self.linear(x))
        return result if self.bias is None else add_(result, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class AllGatherLinear:
    """The weight of `linear` is (this rank's outputs, in). Ranks gather their inputs, divided by
    `ins`, and their outputs, divided by `outs`."""

    linear: Linear
    outs: Split
    ins: Split | None
    ranks: Ranks

    @property
    def row_elements(self) -> int:
        if self.ranks.size == 1:
            return 0
        widths = self.outs.widths if self.ins is None else (*self.ins.widths, *self.outs.widths)
        return 2 * sum(widths)

    @property
    def added_elements(self) -> int:
        """See `Linear.added_elements`."""
        return self.linear.added_elements

    @property
    def rounding(self) -> Compute | None:
        return self.linear.rounding if self.ins is None else None

    def __call__(self, x: Activations) -> Tensor:
        if self.ins is not None:
            x = self.ranks.all_gather(unrounded(x), self.ins.widths)
        return self.ranks.all_gather(self.linear(x), self.outs.widths)


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
        factors: Sequence[Tensor | None],
    ) -> "FusedLinear":
        """weights: each with the number of matrices whose rows it has; sizes, biases and factors:
        of each matrix."""
        parts, divided, begin = [], [], 0
        for weight, count in weights:
            some = slice(begin, begin + count)
            divided.append(tuple(sizes[some]))
            bias = _joined(biases[some], divided[-1], absent=0.0)
            multiplied = _joined(factors[some], divided[-1], absent=1.0)
            parts.append(Linear(weight, bias, factors=multiplied))
            begin += count
        return cls(tuple(parts), tuple(divided), added)

    @property
    def width(self) -> int:
        """Total width of all results."""
        return sum(map(sum, self.sizes))

    @property
    def rounding(self) -> Compute | None:
        """The rounding of the first weight that has one; see `Weight.rounding`."""
        return next((part.rounding for part in self.parts if part.rounding is not None), None)

    def __call__(self, x: Activations) -> tuple[Tensor, ...]:
        wide = for_factors(x, *(part.factors for part in self.parts))
        products = matmuls(wide, [part.weight for part in self.parts])
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
        plain = part.bias is None and part.factors is None and not part.added
        if len(self.parts) > 1 or not plain or any(self.added):
            return gate(*self(x))
        first, second = self.sizes[0]
        assert first == second, self.sizes
        return gated_matmul(x, part.weight, gate)


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """weight (rows, hidden); `held`: the rows of this rank, None for all; additions of adapters;
    factors float32 [hidden] of rows, or none.

    ids [tokens] -> [tokens, hidden], in `dtype`.
    """

    weight: Weight
    dtype: torch.dtype
    held: Split | None = None
    ranks: Ranks = field(default=ALONE)
    added: tuple[LowRankRows | LowRankTypes, ...] = ()
    factors: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.weight.shape[0] if self.held is None else self.held.parts[-1][1]

    def __call__(self, ids: Tensor) -> Tensor:
        foreign = None
        if self.held is not None:
            inside = ids - self.held.begin
            foreign = (inside < 0) | (inside >= self.held.count)
            ids = inside.masked_fill(foreign, 0)
        wide = self.added or self.factors is not None
        rows = embedding_rows(self.weight, ids, torch.float32 if wide else self.dtype)
        if self.factors is not None:
            rows = mul(rows, self.factors.expand_as(rows))
        for each in self.added:
            rows = rows.add_(each(ids))
        rows = rows.to(self.dtype)
        if foreign is None:
            return rows
        return self.ranks.all_reduce(rows.masked_fill_(foreign[:, None], 0.0))


def for_factors(x: Activations, *factors: Tensor | None) -> Activations:
    """x, in float32 if it is in float16 and there are factors: before these multiply a product, it
    may be too large for float16."""
    some = any(each is not None for each in factors)
    return unrounded(x).float() if some and unrounded(x).dtype == torch.float16 else x


def _with_added(result: Tensor, x: Activations, added: Iterable[LowRank]) -> Tensor:
    """`result` with the additions of adapters, changed in place."""
    for each in added:
        result.add_(each(x))
    return result


def _joined(
    vectors: Sequence[Tensor | None], sizes: tuple[int, ...], *, absent: float
) -> Tensor | None:
    """One vector for all matrices; None if none of them has one."""
    present = [vector for vector in vectors if vector is not None]
    if not present:
        return None
    joined = present[0].new_full((sum(sizes),), absent)
    for part, vector in zip(joined.split(sizes), vectors, strict=True):
        if vector is not None:
            part.copy_(vector)
    return joined
