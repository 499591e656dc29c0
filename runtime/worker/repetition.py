"""The parameters of DRY, see `runtime/kernels/repetitions.py`, and the rows that it applies to."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.engine.request import SamplingParams
from runtime.engine.step_plan import SlotLoad
from runtime.kernels.repetitions import LONGEST_REPEAT, RepeatedRows, penalise_repetitions
from runtime.worker.slot_table import SlotTable, TableColumn, TableSpec

_LARGEST_LOG = 88.7228391  # the logarithm of the largest float32
_FLOATS = 2  # multiplier, base
_INTS = 3  # allowed length, last n, longest exponent


@dataclass(frozen=True, slots=True)
class RepeatingRows:
    """Indices [n] int64 of the rows of logits to change, which read at most `window` earlier
    tokens and repetitions of at most `longest` tokens."""

    rows: Tensor
    window: int
    longest: int


def add_penalties(
    table: SlotTable,
    logits: Tensor,
    repeating: RepeatingRows,
    slots: Tensor,
    positions: Tensor,
    tokens: Tensor,
) -> None:
    """logits [rows, vocab] float32, changed in place; slots, positions [rows] int64: of the rows'
    sequences and tokens; tokens [slots, context] int32: of all sequences."""
    rows, window, longest = repeating.rows, repeating.window, repeating.longest
    floats, ints, breakers = table.columns
    repeated = RepeatedRows(
        rows, slots, positions, tokens, floats, ints, breakers, window=window, longest=longest
    )
    penalise_repetitions(logits, repeated)


def longest_repeat(sampling: SamplingParams) -> int:
    """The longest repetition whose length makes a difference."""
    return min(sampling.dry_allowed_length + _steepest(sampling), LONGEST_REPEAT)


def repetition_spec(*, context_tokens: int, vocab_size: int) -> TableSpec:
    """Floats, ints, and the words of the tokens that are sequence breakers."""
    columns = (
        TableColumn((_FLOATS,), torch.float32),
        TableColumn((_INTS,), torch.int64),
        TableColumn((_words(vocab_size),), torch.int32),
    )
    rows = partial(_rows, context_tokens=context_tokens, words=_words(vocab_size))
    return TableSpec(columns, used_by=lambda sampling: sampling.repetitive, rows=rows)


def _rows(
    loads: Sequence[SlotLoad], *, context_tokens: int, words: int
) -> tuple[list[list[float]], list[list[int]], NDArray[np.int32]]:
    sampling = [load.sampling for load in loads]
    breakers = np.zeros((len(sampling), words), np.int32)
    for row, params in enumerate(sampling):
        given = np.frombuffer(params.dry_breakers, np.int32)[:words]
        breakers[row, : len(given)] = given
    lasts = [
        context_tokens if s.dry_penalty_last_n < 0 else min(s.dry_penalty_last_n, context_tokens)
        for s in sampling
    ]
    floats = [[s.dry_multiplier, s.dry_base] for s in sampling]
    ints = [
        [s.dry_allowed_length, last, _steepest(s)] for s, last in zip(sampling, lasts, strict=True)
    ]
    return floats, ints, breakers


def _steepest(sampling: SamplingParams) -> int:
    """The largest exponent for which the power of the base is a finite float32."""
    base = sampling.dry_base
    return int(_LARGEST_LOG / math.log(base)) if base > 1.000001 else 0


def _words(vocab_size: int) -> int:
    return -(-vocab_size // 32)
