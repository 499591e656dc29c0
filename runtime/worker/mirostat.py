"""Mirostat 1 and 2 (Basu et al., "Mirostat", 2021), as in llama.cpp: after the temperature, the
candidates are cut to the most likely tokens so that the surprise of the text approaches a target.

The state, `mu`, changes with each token. A slot has two states, for even and odd positions, so that
a position can be computed again: it reads the same state as before.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.engine.request import SamplingParams
from runtime.kernels.draws import ONE

_FLOATS = 4  # version, target, learning rate, mu
_RANKED = 100  # number of most likely tokens from which version 1 estimates Zipf's exponent


@dataclass(frozen=True, slots=True)
class LoadedMirostats:
    """Rows of the table to replace: slots [n] int64, values as of `mirostat_row` [n, 4] float32."""

    slots: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class MirostatRows:
    """Parameters and state of rows, [rows, 1] float64 each; target and state in bits."""

    version: Tensor
    target: Tensor
    rate: Tensor
    mu: Tensor


class MirostatTable:
    """Parameters and states of all slots on the device."""

    def __init__(self, *, slots: int, device: torch.device) -> None:
        self._values = torch.zeros((slots, _FLOATS - 1), dtype=torch.float32, device=device)
        self._mus = torch.zeros((slots, 2), dtype=torch.float32, device=device)

    def load(self, loaded: LoadedMirostats) -> None:
        self._values.index_copy_(0, loaded.slots, loaded.values[:, :-1])
        self._mus.index_copy_(0, loaded.slots, loaded.values[:, -1:].expand(-1, 2))

    def rows(self, slots: Tensor, positions: Tensor) -> MirostatRows:
        """Parameters and states for the tokens to draw at `positions` of `slots`, [n] int64
        each."""
        version, target, rate = self._values[slots].double().split(1, dim=1)
        mus = self.states(slots, positions)[:, None].double()
        return MirostatRows(version, target, rate, mus)

    def states(self, slots: Tensor, positions: Tensor) -> Tensor:
        """The states before the tokens at `positions`: [n] float32."""
        return self._mus[slots, positions & 1]

    def store(self, slots: Tensor, positions: Tensor, mus: Tensor) -> None:
        """`mus` [n] float32: the states before the tokens at `positions`."""
        self._mus[slots, positions & 1] = mus


def mirostat_bytes(slots: int) -> int:
    return 4 * slots * (_FLOATS - 1 + 2)


def mirostat_row(sampling: SamplingParams, mu: float | None) -> list[float]:
    """A row of the values of `LoadedMirostats`. `mu`: None before the first token."""
    first = 2 * sampling.mirostat_tau
    state = first if mu is None else mu
    return [sampling.mirostat, sampling.mirostat_tau, sampling.mirostat_eta, state]


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
