"""Biases that requests add to the logits of single tokens, a sparse row for each slot."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.engine.request import MAX_BARRED_TOKENS, MAX_LOGIT_BIASES, SamplingParams
from runtime.engine.step_plan import SlotLoad
from runtime.worker.slot_table import SlotTable, TableColumn, TableSpec

ENTRIES = MAX_LOGIT_BIASES + MAX_BARRED_TOKENS
_FOREVER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class BiasedRows:
    """Indices [n] int64 of the rows of logits to change, which use at most `width` entries."""

    rows: Tensor
    width: int


def add_biases(
    table: SlotTable, logits: Tensor, biased: BiasedRows, slots: Tensor, positions: Tensor
) -> None:
    """logits [rows, vocab] float32, changed in place; slots, positions [rows] int64: of the rows'
    sequences and tokens.

    A cell has at most one finite addend other than zero, so the order of addition does not matter.
    """
    rows = biased.rows
    tokens, values, untils = (column[slots[rows], : biased.width] for column in table.columns)
    active = positions[rows][:, None] < untils
    added = torch.where(active, values, 0.0)
    logits.index_put_((rows[:, None].expand_as(tokens), tokens.long()), added, accumulate=True)


def used_entries(sampling: SamplingParams) -> int:
    return len(sampling.logit_bias) + len(sampling.barred)


def bias_spec() -> TableSpec:
    """Tokens, values and untils. An entry counts at positions before its until."""
    columns = (
        TableColumn((ENTRIES,), torch.int32),
        TableColumn((ENTRIES,), torch.float32),
        TableColumn((ENTRIES,), torch.int32),
    )
    return TableSpec(columns, used_by=lambda sampling: sampling.biased, rows=_rows)


def _rows(
    loads: Sequence[SlotLoad],
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]:
    tokens = np.zeros((len(loads), ENTRIES), np.int32)
    values = np.zeros((len(loads), ENTRIES), np.float32)
    untils = np.zeros((len(loads), ENTRIES), np.int32)
    for row, params in enumerate(load.sampling for load in loads):
        given, used = len(params.logit_bias), used_entries(params)
        assert given <= MAX_LOGIT_BIASES and used - given <= MAX_BARRED_TOKENS
        tokens[row, :used] = [*(token for token, _ in params.logit_bias), *params.barred]
        values[row, :given] = [value for _, value in params.logit_bias]
        values[row, given:used] = -np.inf
        untils[row, :given] = _FOREVER
        untils[row, given:used] = min(params.barred_until, _FOREVER)
    return tokens, values, untils
