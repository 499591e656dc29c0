"""Bundles of (row, expert) pairs of the same expert, built without synchronisation."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.triton.launch import launch, next_power

_READ = 1024  # pairs that a program reads at once


@dataclass(frozen=True, slots=True, eq=False)
class Bundles:
    """ExpertPairs of a row and an expert, by expert: experts int32 [n], pairs int32 [n, size].

    Unused places have the number of pairs; a bundle's used ones come first.
    """

    experts: Tensor
    pairs: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPairs:
    """(row, expert) pairs as rows of a product: pair n has row n // share of x. `factors`: one per
    pair; `bias`: one per expert."""

    bundles: Bundles
    share: int
    factors: Tensor | None
    bias: Tensor | None


def pairs_of(
    x: Tensor, bundles: Bundles, shape: torch.Size, bias: Tensor | None, scale: Tensor | None
) -> ExpertPairs:
    """x [tokens, in] or [tokens, used, in]; `shape`: [tokens, used] of the pairs; bias and scale as
    of `expert_products`."""
    factors = None if scale is None else scale.float().flatten()
    return ExpertPairs(bundles, shape[1] if x.dim() == 2 else 1, factors, bias)


def bundles_of(chosen: Tensor, experts: int, size: int) -> Bundles:
    """chosen [pairs] int64, below `experts` -> the maximum possible number of bundles of `size`."""
    pairs, device = len(chosen), chosen.device
    most = pairs // size + min(experts, pairs)
    result = Bundles(
        torch.empty(most, dtype=torch.int32, device=device),
        torch.empty(most, size, dtype=torch.int32, device=device),
    )
    counts = torch.empty(experts, dtype=torch.int32, device=device)
    launch(count_kernel, (experts,), chosen, counts, pairs, READ=_READ, device=device)
    launch(
        bundle_kernel, (experts + 1,), chosen, counts, result.experts, result.pairs, pairs, experts,
        most, SIZE=size, EXPERTS=next_power(experts), READ=_READ, device=device,
    )  # fmt: skip
    return result


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(chosen, counts, pairs, READ: tl.constexpr):
    """Count the pairs of each expert. Grid: experts."""
    expert = tl.program_id(0)
    count = tl.zeros([READ], tl.int32)
    for begin in range(0, pairs, READ):
        pair = begin + tl.arange(0, READ)
        count += (tl.load(chosen + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(count))


@triton.jit(do_not_specialize=["pairs", "bundles"])
def bundle_kernel(
    chosen, counts, bundle_experts, bundle_pairs, pairs, experts, bundles,
    SIZE: tl.constexpr, EXPERTS: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Build the bundles. Grid: experts, and one more program that marks unused bundles."""
    expert, others = tl.program_id(0), tl.arange(0, EXPERTS)
    needed = tl.load(counts + others, mask=others < experts, other=0)
    needed = (needed + SIZE - 1) // SIZE
    begin = tl.sum(tl.where(others < expert, needed, 0))
    end = begin + tl.sum(tl.where(others == expert, needed, 0))
    end = tl.where(expert == experts, bundles, end)
    number = tl.arange(0, READ)
    for first in range(begin, end, READ):
        tl.store(bundle_experts + first + number, expert, mask=first + number < end)
    filled = begin * SIZE
    for first in range(0, pairs, READ):
        pair = first + number
        mine = tl.load(chosen + pair, mask=pair < pairs, other=-1) == expert
        place = filled + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(bundle_pairs + place, pair, mask=mine)
        filled += tl.sum(mine.to(tl.int32))
    for first in range(filled, end * SIZE, READ):
        tl.store(bundle_pairs + first + number, pairs, mask=first + number < end * SIZE)
