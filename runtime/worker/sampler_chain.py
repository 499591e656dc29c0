"""The samplers of llama.cpp besides top_k, top_p and min_p, in its order: top_n_sigma, top_k,
typical_p, top_p, min_p, XTC, temperature.

Sums over tokens are sums of integers, and all other functions work on single elements, so a row's
result does not depend on other rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.engine.step_plan import SlotLoad
from runtime.kernels.draws import ONE
from runtime.kernels.token_order import ascending
from runtime.worker.slot_table import TableColumn, TableSpec

XTC_STREAM = 0x585443  # changes the seed for the random number of XTC

COLDEST = 1e-7  # at temperatures up to this one, the most likely candidate is taken
_FLOATS = 6


@dataclass(frozen=True, slots=True)
class ChainRows:
    """Parameters of rows, [rows, 1] each; `chain` [rows, 6] as of `chain_spec`. `chance`: the
    random number in [0, 1) that XTC compares with its probability."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    chain: Tensor
    chance: Tensor


def chain_spec() -> TableSpec:
    """The parameters of a request, in the order of the samplers."""
    columns = (TableColumn((_FLOATS,), torch.float32),)
    return TableSpec(columns, used_by=lambda sampling: sampling.chained, rows=_rows)


def _rows(loads: Sequence[SlotLoad]) -> tuple[list[list[float]]]:
    values = [
        [
            s.top_n_sigma,
            s.typical_p,
            s.xtc_probability,
            s.xtc_threshold,
            s.dynatemp_range,
            s.dynatemp_exponent,
        ]
        for s in (load.sampling for load in loads)
    ]
    return (values,)


def odds_of(values: Tensor, rows: ChainRows) -> Tensor:
    """Descending logits [rows, n] float32 -> odds [rows, n] float32, proportional to probabilities:
    1 for the most likely column, 0 for those that are filtered out."""
    chain = rows.chain.double()
    sigmas, typical_p, probability, threshold = (chain[:, i : i + 1] for i in range(4))
    depths = values[:, :1] - values
    kept = values > -torch.inf
    kept &= (depths <= sigmas * _deviation(depths, kept)) | (sigmas <= 0)
    kept &= torch.arange(values.shape[1], device=values.device) < rows.top_k
    weights = (torch.exp(-depths) * ONE).long()
    kept &= _typical(depths, weights * kept, kept, typical_p) | (typical_p >= 1)
    inside = weights * kept
    sums = inside.cumsum(dim=1)
    kept &= sums - inside <= (sums[:, -1:].double() * rows.top_p.double()).long()
    kept &= torch.exp(_first(depths, kept) - depths) >= rows.min_p
    excluded = _above(weights * kept, kept, threshold) & (rows.chance < probability)
    kept &= ~excluded
    temperature = _temperature(depths, weights * kept, kept, rows.temperature, chain[:, 4:])
    odds = torch.exp((_first(depths, kept) - depths) / temperature) * kept
    return torch.where(temperature > COLDEST, odds, (kept & (kept.cumsum(dim=1) == 1)).float())


def _deviation(depths: Tensor, kept: Tensor) -> Tensor:
    """The standard deviation of the kept columns: [rows, 1] float64.

    Sums have 40 binary places in units of the power of two above the row's largest depth.
    """
    depths = torch.where(kept, depths, 0.0).double()
    deepest = depths.amax(dim=1, keepdim=True)
    unit = torch.where(deepest > 0, deepest / torch.frexp(deepest).mantissa, 1.0)
    ratios, count = depths / unit, kept.sum(dim=1, keepdim=True).double() * ONE
    mean = (ratios * ONE).long().sum(dim=1, keepdim=True) / count
    square = (ratios * ratios * ONE).long().sum(dim=1, keepdim=True) / count
    return (square - mean * mean).clamp_(min=0).sqrt() * unit


def _typical(depths: Tensor, weights: Tensor, kept: Tensor, mass: Tensor) -> Tensor:
    """Locally typical sampling (Meister et al., 2022): the columns whose surprise is nearest to the
    entropy, until their probability exceeds `mass` [rows, 1]; the more likely first among equals.
    """
    scores = (depths - _mean_depth(depths, weights)).abs().float().masked_fill_(~kept, torch.inf)
    columns = torch.arange(depths.shape[1], device=depths.device)
    order = ascending((scores.view(torch.int32).long() << 32) + columns) & 0xFFFFFFFF
    nearest = weights.gather(1, order)
    sums = nearest.cumsum(dim=1)
    near = sums - nearest <= (sums[:, -1:].double() * mass).long()
    return torch.zeros_like(kept).scatter_(1, order, near)


def _above(weights: Tensor, kept: Tensor, threshold: Tensor) -> Tensor:
    """The kept columns with a probability of at least `threshold`, except for the least likely one
    of them."""
    total = weights.sum(dim=1, keepdim=True).double()
    above = kept & (weights >= threshold * total)
    return above & (above.cumsum(dim=1) < above.sum(dim=1, keepdim=True))


def _temperature(
    depths: Tensor, weights: Tensor, kept: Tensor, temperature: Tensor, dynamic: Tensor
) -> Tensor:
    """[rows, 1] float32, for `dynamic` [rows, 2] float64: range and exponent.

    With a range it grows from the lower to the upper end with a power of the entropy, as a share of
    the largest entropy that as many candidates can have.
    """
    spread, exponent = dynamic[:, :1], dynamic[:, 1:]
    total = weights.sum(dim=1, keepdim=True).double() / ONE
    entropy = torch.log(total) + _mean_depth(depths, weights)
    largest = torch.log(kept.sum(dim=1, keepdim=True).double())
    share = torch.where(largest > 0, entropy / largest, 0.0).clamp_(1e-300, 1)
    low, high = (temperature - spread).clamp_(min=0), temperature + spread
    found = low + (high - low) * torch.exp(exponent * torch.log(share))
    return torch.where(spread > 0, found, temperature.double()).float().clamp_(min=COLDEST)


def _mean_depth(depths: Tensor, weights: Tensor) -> Tensor:
    """The expected depth: [rows, 1] float64."""
    parts = (weights * torch.where(weights > 0, depths, 0.0).double()).long()
    return parts.sum(dim=1, keepdim=True).double() / weights.sum(dim=1, keepdim=True).double()


def _first(depths: Tensor, kept: Tensor) -> Tensor:
    """The depth of the most likely column that is kept: [rows, 1]."""
    return torch.where(kept, depths, torch.inf).amin(dim=1, keepdim=True)
