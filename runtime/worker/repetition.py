"""DRY: a penalty for tokens that would continue a repetition of the end of the text, as in
llama.cpp; sequence breakers are single tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.engine.request import SamplingParams

# Longer repetitions count as this many tokens, because each token costs a comparison.
LONGEST_REPEAT = 256
_LARGEST_LOG = 88.7228391  # the logarithm of the largest float32
_LARGEST_PENALTY = 1e30
_FLOATS = 2  # multiplier, base
_INTS = 3  # allowed length, last n, longest exponent


@dataclass(frozen=True, slots=True)
class LoadedRepetitions:
    """Rows of the table to replace: slots [n] int64; floats [n, 2] float32, ints [n, 3] int64 and
    words [n, ceil(vocab / 32)] int32 as of `repetition_rows`."""

    slots: Tensor
    floats: Tensor
    ints: Tensor
    words: Tensor


@dataclass(frozen=True, slots=True)
class RepeatingRows:
    """Indices [n] int64 of the rows of logits to change, which read at most `window` earlier
    tokens and repetitions of at most `longest` tokens."""

    rows: Tensor
    window: int
    longest: int


class RepetitionTable:
    """The parameters of all slots on the device."""

    def __init__(self, *, slots: int, vocab_size: int, device: torch.device) -> None:
        self._floats = torch.zeros((slots, _FLOATS), dtype=torch.float32, device=device)
        self._ints = torch.zeros((slots, _INTS), dtype=torch.int64, device=device)
        shape = (slots, _words(vocab_size))
        self._breakers = torch.zeros(shape, dtype=torch.int32, device=device)

    def load(self, loaded: LoadedRepetitions) -> None:
        self._floats.index_copy_(0, loaded.slots, loaded.floats)
        self._ints.index_copy_(0, loaded.slots, loaded.ints)
        self._breakers.index_copy_(0, loaded.slots, loaded.words)

    def apply(
        self,
        logits: Tensor,
        repeating: RepeatingRows,
        slots: Tensor,
        positions: Tensor,
        tokens: Tensor,
    ) -> None:
        """logits [rows, vocab] float32, changed in place; slots, positions [rows] int64: of the
        rows' sequences and tokens; tokens [slots, context] int32: of all sequences."""
        rows = repeating.rows
        slots, ends = slots[rows], positions[rows]
        allowed, last_n, steepest = (self._ints[slots, i][:, None] for i in range(_INTS))
        back = torch.arange(1, repeating.window + 1, device=logits.device)
        places = ends[:, None] - back
        read = (places >= 0) & (back <= last_n)
        known = tokens[slots[:, None], places.clamp(min=0)].long()
        breaks = (self._breakers[slots].gather(1, known >> 5) >> (known & 31)) & 1 != 0
        # Number of tokens after the last sequence breaker, or of all tokens in the window.
        limit = torch.where(breaks | ~read, back - 1, repeating.window).amin(dim=1, keepdim=True)
        lengths = _repeats(torch.where(read, known, -1), limit, repeating.longest)
        counts = read & (lengths >= allowed) & (limit >= allowed)
        counts &= read.sum(dim=1, keepdim=True) > allowed
        exponents = torch.minimum(lengths - allowed, steepest).double()
        multiplier, base = (self._floats[slots, i][:, None].double() for i in range(_FLOATS))
        found = multiplier * torch.exp(exponents * torch.log(base))
        penalties = (found.clamp(max=_LARGEST_PENALTY) * counts).float()
        # Column k: length of the match that ends k tokens earlier; known[k - 1] continued it.
        penalties = torch.where(breaks[:, :-1], 0.0, penalties[:, 1:])
        most = torch.zeros_like(logits[rows])
        logits[rows] -= most.scatter_reduce_(1, known[:, :-1], penalties, "amax")


def longest_repeat(sampling: SamplingParams) -> int:
    """The longest repetition whose length makes a difference."""
    return min(sampling.dry_allowed_length + _steepest(sampling), LONGEST_REPEAT)


def repetition_bytes(slots: int, vocab_size: int) -> int:
    return slots * (4 * _FLOATS + 8 * _INTS + 4 * _words(vocab_size))


def repetition_rows(
    sampling: Sequence[SamplingParams], *, context_tokens: int, vocab_size: int
) -> tuple[list[list[float]], list[list[int]], NDArray[np.int32]]:
    """Floats, ints and words of `LoadedRepetitions`, a row for each."""
    words = np.zeros((len(sampling), _words(vocab_size)), np.int32)
    for row, params in enumerate(sampling):
        given = np.frombuffer(params.dry_breakers, np.int32)[: words.shape[1]]
        words[row, : len(given)] = given
    lasts = [
        context_tokens if s.dry_penalty_last_n < 0 else min(s.dry_penalty_last_n, context_tokens)
        for s in sampling
    ]
    floats = [[s.dry_multiplier, s.dry_base] for s in sampling]
    ints = [
        [s.dry_allowed_length, last, _steepest(s)] for s, last in zip(sampling, lasts, strict=True)
    ]
    return floats, ints, words


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
