"""Tokens that may not be drawn: all but the allowed ones, and those that would complete a bad word
(vLLM's `allowed_token_ids` and `bad_words`)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.engine.request import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams
from runtime.kernels.draws import forbid

_NONE, _OUTSIDE = -1, -2  # placeholders: after the end of a word; outside the answer


@dataclass(frozen=True, slots=True)
class LoadedRestrictions:
    """Rows of the table to replace: slots and begins [n] int64; words [n, MAX_BAD_WORDS,
    MAX_BAD_WORD_TOKENS] and allowed [n, ceil(vocab / 32)] int32, as of `restriction_rows`."""

    slots: Tensor
    begins: Tensor
    words: Tensor
    allowed: Tensor


@dataclass(frozen=True, slots=True)
class RestrictedRows:
    """Indices [n] int64 of the rows of logits to change, which have at most `count` bad words of
    at most `longest` tokens. `limited`: some of them may draw allowed tokens only."""

    rows: Tensor
    count: int
    longest: int
    limited: bool


class RestrictionTable:
    """The restrictions of all slots on the device.

    Words are stored backwards: `_words[slot, word, 0]` is the last token of a word, which may not
    be drawn after the others. Answers begin at `_begins`.
    """

    def __init__(self, *, slots: int, vocab_size: int, device: torch.device) -> None:
        words = (slots, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)
        allowed = (slots, _mask_words(vocab_size))
        self._begins = torch.zeros(slots, dtype=torch.int64, device=device)
        self._words = torch.full(words, _NONE, dtype=torch.int32, device=device)
        self._allowed = torch.full(allowed, -1, dtype=torch.int32, device=device)

    def load(self, loaded: LoadedRestrictions) -> None:
        self._begins.index_copy_(0, loaded.slots, loaded.begins)
        self._words.index_copy_(0, loaded.slots, loaded.words)
        self._allowed.index_copy_(0, loaded.slots, loaded.allowed)

    def apply(
        self,
        logits: Tensor,
        restricted: RestrictedRows,
        slots: Tensor,
        positions: Tensor,
        tokens: Tensor,
    ) -> None:
        """logits [rows, vocab] float32, changed in place; slots, positions [rows] int64: of the
        rows' sequences and tokens; tokens [slots, context] int32: of all sequences."""
        rows = restricted.rows
        slots, ends = slots[rows], positions[rows]
        if restricted.limited:
            forbid(logits, rows, self._allowed[slots], len(rows))
        if not restricted.count:
            return
        words = self._words[slots, : restricted.count, : restricted.longest]
        places = ends[:, None] - torch.arange(1, restricted.longest, device=logits.device)
        known = tokens[slots[:, None], places.clamp(min=0)]
        known = torch.where(places >= self._begins[slots][:, None], known, _OUTSIDE)
        last, earlier = words[:, :, 0], words[:, :, 1:]
        completed = ((earlier == known[:, None, :]) | (earlier == _NONE)).all(dim=2)
        completed &= last != _NONE
        added = torch.where(completed, -torch.inf, 0.0)
        cells = (rows[:, None].expand_as(last), last.clamp(min=0).long())
        logits.index_put_(cells, added, accumulate=True)


def restriction_bytes(slots: int, vocab_size: int) -> int:
    """Bytes of the tables of `slots` slots."""
    return slots * (8 + 4 * MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS + 4 * _mask_words(vocab_size))


def longest_word(sampling: SamplingParams) -> int:
    return max(map(len, sampling.bad_words), default=0)


def restriction_rows(
    sampling: Sequence[SamplingParams], vocab_size: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Words and allowed tokens of `LoadedRestrictions`, a row for each."""
    words = np.full((len(sampling), MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), _NONE, np.int32)
    allowed = np.full((len(sampling), _mask_words(vocab_size)), -1, np.int32)
    for row, params in enumerate(sampling):
        assert len(params.bad_words) <= MAX_BAD_WORDS
        for number, word in enumerate(params.bad_words):
            words[row, number, : len(word)] = word[::-1]
        if params.allowed:
            given = np.frombuffer(params.allowed, np.int32)
            allowed[row] = 0
            allowed[row, : len(given)] = given
    return words, allowed


def _mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)
