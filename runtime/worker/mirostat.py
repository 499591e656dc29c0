"""Mirostat 1 and 2 (Basu et al., "Mirostat", 2021), as in llama.cpp: after the temperature, the
candidates are cut to the most likely tokens so that the surprise of the text approaches a target.

The state, `mu`, changes with each token. A slot has two states, for even and odd positions, so that
a position can be computed again: it reads the same state as before.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.engine.step_plan import SlotLoad
from runtime.kernels.draws import ONE
from runtime.worker.slot_table import SlotTable, TableColumn, TableSpec

_RANKED = 100  # number of most likely tokens from which version 1 estimates Zipf's exponent


@dataclass(frozen=True, slots=True)
class MirostatRows:
    """Parameters and state of rows, [rows, 1] float64 each; target and state in bits."""

    version: Tensor
    target: Tensor
    rate: Tensor
    mu: Tensor


def mirostat_parameters(table: SlotTable, slots: Tensor, positions: Tensor) -> MirostatRows:
    """Parameters and states for the tokens to draw at `positions` of `slots`, [n] int64 each."""
    version, target, rate = table.columns[0][slots].double().split(1, dim=1)
    mus = mirostat_states(table, slots, positions)[:, None].double()
    return MirostatRows(version, target, rate, mus)


def mirostat_states(table: SlotTable, slots: Tensor, positions: Tensor) -> Tensor:
    """The states before the tokens at `positions`: [n] float32."""
    return table.columns[1][slots, positions & 1]


def store_states(table: SlotTable, slots: Tensor, positions: Tensor, mus: Tensor) -> None:
    """`mus` [n] float32: the states before the tokens at `positions`."""
    table.columns[1][slots, positions & 1] = mus


def mirostat_spec() -> TableSpec:
    """Version, target and learning rate; the states at even and odd positions."""
    columns = TableColumn((3,), torch.float32), TableColumn((2,), torch.float32)
    return TableSpec(columns, used_by=lambda sampling: sampling.adaptive, rows=_rows)


def _rows(loads: Sequence[SlotLoad]) -> tuple[list[list[float]], list[list[float]]]:
    sampling = [load.sampling for load in loads]
    values = [[s.mirostat, s.mirostat_tau, s.mirostat_eta] for s in sampling]
    states = [_state(load) for load in loads]
    return values, [[state, state] for state in states]


def _state(load: SlotLoad) -> float:
    """After the tokens of the load."""
    mu = load.mirostat_mu
    return 2 * load.sampling.mirostat_tau if mu is None else mu


def kept_weights(depths: Tensor, rows: MirostatRows) -> Tensor:
    """depths [rows, vocab] float32, ascending: distances of the logits, divided by the temperature,
    below the largest one -> weights [rows, vocab] int64 proportional to the probabilities, 0 for
    removed tokens."""
    weights = (torch.exp(-depths) * ONE).long()
    ranks = torch.arange(depths.shape[1], device=depths.device)
    surprises = _surprises(depths, weights.sum(dim=1, keepdim=True))
    first = ranks < _most_likely(depths, rows.mu)
    kept = torch.where(rows.version == 1, first, surprises <= rows.mu) | (ranks == 0)
    return weights * kept


def states_after(depths: Tensor, totals: Tensor, rows: MirostatRows) -> Tensor:
    """The states [rows] float32 after tokens with these depths [rows, 1] were drawn. totals int64
    [rows, 1]: the sums of the rows' weights."""
    error = _surprises(depths, totals) - rows.target
    return (rows.mu - rows.rate * error)[:, 0].float()


def _surprises(depths: Tensor, totals: Tensor) -> Tensor:
    """Negative binary logarithms of probabilities, in float64."""
    return (depths.double() + torch.log(totals.double() / ONE)) / math.log(2)


def _most_likely(depths: Tensor, mu: Tensor) -> Tensor:
    """Number of tokens that version 1 keeps, [rows, 1] float64, if probabilities follow Zipf's
    law."""
    vocab = depths.shape[1]
    ranked = depths[:, :_RANKED].double()
    numbers = torch.arange(1, ranked.shape[1], device=depths.device).double()
    ratios = torch.log((numbers + 1) / numbers)
    known = torch.isfinite(ranked[:, 1:])
    steps = torch.where(known, ranked[:, 1:] - ranked[:, :-1], 0.0)
    slope = _sum(ratios * steps) / _sum(ratios * ratios * known).clamp(min=1 / ONE)
    slope = slope.clamp(min=1e-9)
    excess = slope - 1
    near = excess.abs() < 1e-9  # the limit
    excess = torch.where(near, 1.0, excess)
    share = excess / -torch.expm1(-excess * math.log(vocab))
    share = torch.where(near, 1 / math.log(vocab), share)
    count = torch.exp(((torch.log(share) + mu * math.log(2)) / slope).clamp(max=64))
    return count.floor()


def _sum(values: Tensor) -> Tensor:
    """The sum of each row [rows, 1], independent of the order of addition: values are rounded to 40
    binary places in units of the power of two above the largest one."""
    largest = values.amax(dim=1, keepdim=True)
    unit = torch.where(largest > 0, largest / torch.frexp(largest).mantissa, 1.0)
    return (values / unit * ONE).long().sum(dim=1, keepdim=True).double() / ONE * unit
