"""Biases that requests add to the logits of single tokens, a sparse row for each slot."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.engine.request import MAX_BARRED_TOKENS, MAX_LOGIT_BIASES, SamplingParams

ENTRIES = MAX_LOGIT_BIASES + MAX_BARRED_TOKENS
_FOREVER = 2**31 - 1
_BYTES = 4 + 4 + 4  # bytes of an entry: token, value, until


@dataclass(frozen=True, slots=True)
class LoadedBiases:
    """Rows of the table to replace: slots [n] int64; tokens and untils [n, ENTRIES] int32; values
    [n, ENTRIES] float32. An entry counts at positions before its `until`."""

    slots: Tensor
    tokens: Tensor
    values: Tensor
    untils: Tensor


@dataclass(frozen=True, slots=True)
class BiasedRows:
    """Indices [n] int64 of the rows of logits to change, which use at most `width` entries."""

    rows: Tensor
    width: int


class BiasTable:
    """The entries of all slots on the device."""

    def __init__(self, *, slots: int, device: torch.device) -> None:
        shape = (slots, ENTRIES)
        self._tokens = torch.zeros(shape, dtype=torch.int32, device=device)
        self._values = torch.zeros(shape, dtype=torch.float32, device=device)
        self._untils = torch.zeros(shape, dtype=torch.int32, device=device)

    def load(self, loaded: LoadedBiases) -> None:
        self._tokens.index_copy_(0, loaded.slots, loaded.tokens)
        self._values.index_copy_(0, loaded.slots, loaded.values)
        self._untils.index_copy_(0, loaded.slots, loaded.untils)

    def apply(self, logits: Tensor, biased: BiasedRows, slots: Tensor, positions: Tensor) -> None:
        """logits [rows, vocab] float32, changed in place; slots, positions [rows] int64: of the
        rows' sequences and tokens.

        A cell has at most one finite addend other than zero, so the order of addition does not
        matter.
        """
        rows = biased.rows
        tokens, values, untils = (
            table[slots[rows], : biased.width]
            for table in (self._tokens, self._values, self._untils)
        )
        active = positions[rows][:, None] < untils
        added = torch.where(active, values, 0.0)
        logits.index_put_((rows[:, None].expand_as(tokens), tokens.long()), added, accumulate=True)


def table_bytes(slots: int) -> int:
    return slots * ENTRIES * _BYTES


def used_entries(sampling: SamplingParams) -> int:
    return len(sampling.logit_bias) + len(sampling.barred)


def rows_of(
    sampling: Sequence[SamplingParams],
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]:
    """Tokens, values and untils of `LoadedBiases`, a row for each element of `sampling`."""
    tokens = np.zeros((len(sampling), ENTRIES), np.int32)
    values = np.zeros((len(sampling), ENTRIES), np.float32)
    untils = np.zeros((len(sampling), ENTRIES), np.int32)
    for row, params in enumerate(sampling):
        given, used = len(params.logit_bias), used_entries(params)
        assert given <= MAX_LOGIT_BIASES and used - given <= MAX_BARRED_TOKENS
        tokens[row, :used] = [*(token for token, _ in params.logit_bias), *params.barred]
        values[row, :given] = [value for _, value in params.logit_bias]
        values[row, given:used] = -np.inf
        untils[row, :given] = _FOREVER
        untils[row, given:used] = min(params.barred_until, _FOREVER)
    return tokens, values, untils
