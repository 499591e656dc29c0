"""DRY: a penalty for tokens that would continue a repetition of the end of the text, as in
llama.cpp; sequence breakers are single tokens."""

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
from runtime.worker.slot_table import SlotTable, TableColumn, TableSpec

# Longer repetitions count as this many tokens, because each token costs a comparison.
LONGEST_REPEAT = 256
_LARGEST_LOG = 88.7228391  # the logarithm of the largest float32
_LARGEST_PENALTY = 1e30
_FLOATS = 2  # multiplier, base
_INTS = 3  # allowed length, last n, longest exponent


@dataclass(frozen=True, slots=True)
class RepeatingRows:
    """Indices [n] int64 of the rows of logits to change, which read at most `window` earlier
    tokens and repetitions of at most `longest` tokens."""

    rows: Tensor
    window: int
    longest: int


def penalise_repetitions(
    table: SlotTable,
    logits: Tensor,
    repeating: RepeatingRows,
    slots: Tensor,
    positions: Tensor,
    tokens: Tensor,
) -> None:
    """logits [rows, vocab] float32, changed in place; slots, positions [rows] int64: of the rows'
    sequences and tokens; tokens [slots, context] int32: of all sequences."""
    floats, ints, breakers = table.columns
    rows = repeating.rows
    slots, ends = slots[rows], positions[rows]
    allowed, last_n, steepest = (ints[slots, i][:, None] for i in range(_INTS))
    back = torch.arange(1, repeating.window + 1, device=logits.device)
    places = ends[:, None] - back
    read = (places >= 0) & (back <= last_n)
    known = tokens[slots[:, None], places.clamp(min=0)].long()
    breaks = (breakers[slots].gather(1, known >> 5) >> (known & 31)) & 1 != 0
    # Number of tokens after the last sequence breaker, or of all tokens in the window.
    limit = torch.where(breaks | ~read, back - 1, repeating.window).amin(dim=1, keepdim=True)
    lengths = _repeats(torch.where(read, known, -1), limit, repeating.longest)
    counts = read & (lengths >= allowed) & (limit >= allowed)
    counts &= read.sum(dim=1, keepdim=True) > allowed
    exponents = torch.minimum(lengths - allowed, steepest).double()
    multiplier, base = (floats[slots, i][:, None].double() for i in range(_FLOATS))
    found = multiplier * torch.exp(exponents * torch.log(base))
    penalties = (found.clamp(max=_LARGEST_PENALTY) * counts).float()
    # Column k: length of the match that ends k tokens earlier; known[k - 1] continued it.
    penalties = torch.where(breaks[:, :-1], 0.0, penalties[:, 1:])
    most = torch.zeros_like(logits[rows])
    logits[rows] -= most.scatter_reduce_(1, known[:, :-1], penalties, "amax")


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


def _repeats(tokens: Tensor, limit: Tensor, longest: int) -> Tensor:
    """tokens [rows, n] int64, the newest first, -1 for none -> [rows, n]: column k is the number of
    newest tokens, at most `limit` [rows, 1] and `longest`, that also stand k tokens earlier."""
    count = tokens.shape[1]
    longest = min(longest, count - 1)
    padded = torch.nn.functional.pad(tokens, (0, longest), value=-1)
    lengths = torch.zeros_like(tokens)
    alive = torch.ones_like(tokens, dtype=torch.bool)
    for step in range(longest):
        earlier = padded[:, step : step + count]
        alive &= (tokens[:, step : step + 1] == earlier) & (earlier >= 0) & (limit > step)
        alive[:, 0] = False
        if alive.device.type == "cpu" and not alive.any():
            break
        lengths += alive
    return lengths


def _words(vocab_size: int) -> int:
    return -(-vocab_size // 32)
