"""Tokens that may not be drawn: all but the allowed ones, and those that would complete a bad word
(vLLM's `allowed_token_ids` and `bad_words`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.engine.request import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams
from runtime.engine.step_plan import SlotLoad
from runtime.kernels.draws import forbid
from runtime.worker.slot_table import SlotTable, TableColumn, TableSpec

_NONE, _OUTSIDE = -1, -2  # placeholders: after the end of a word; outside the answer


@dataclass(frozen=True, slots=True)
class RestrictedRows:
    """Indices [n] int64 of the rows of logits to change, which have at most `count` bad words of
    at most `longest` tokens. `limited`: some of them may draw allowed tokens only."""

    rows: Tensor
    count: int
    longest: int
    limited: bool


def forbid_restricted(
    table: SlotTable,
    logits: Tensor,
    restricted: RestrictedRows,
    slots: Tensor,
    positions: Tensor,
    tokens: Tensor,
) -> None:
    """logits [rows, vocab] float32, changed in place; slots, positions [rows] int64: of the rows'
    sequences and tokens; tokens [slots, context] int32: of all sequences."""
    begins, bad_words, allowed = table.columns
    rows = restricted.rows
    slots, ends = slots[rows], positions[rows]
    if restricted.limited:
        forbid(logits, rows, allowed[slots], len(rows))
    if not restricted.count:
        return
    words = bad_words[slots, : restricted.count, : restricted.longest]
    places = ends[:, None] - torch.arange(1, restricted.longest, device=logits.device)
    known = tokens[slots[:, None], places.clamp(min=0)]
    known = torch.where(places >= begins[slots][:, None], known, _OUTSIDE)
    last, earlier = words[:, :, 0], words[:, :, 1:]
    completed = ((earlier == known[:, None, :]) | (earlier == _NONE)).all(dim=2)
    completed &= last != _NONE
    added = torch.where(completed, -torch.inf, 0.0)
    cells = (rows[:, None].expand_as(last), last.clamp(min=0).long())
    logits.index_put_(cells, added, accumulate=True)


def longest_word(sampling: SamplingParams) -> int:
    return max(map(len, sampling.bad_words), default=0)


def restriction_spec(vocab_size: int) -> TableSpec:
    """Where the answer begins, bad words, and the words of the allowed tokens.

    Bad words are stored backwards: the first token is the last one of the word, which may not be
    drawn after the others.
    """
    columns = (
        TableColumn((), torch.int64),
        TableColumn((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), torch.int32, fill=_NONE),
        TableColumn((_mask_words(vocab_size),), torch.int32, fill=-1),
    )
    rows = partial(_rows, mask_words=_mask_words(vocab_size))
    return TableSpec(columns, used_by=lambda sampling: sampling.restricted, rows=rows)


def _rows(
    loads: Sequence[SlotLoad], *, mask_words: int
) -> tuple[list[int], NDArray[np.int32], NDArray[np.int32]]:
    words = np.full((len(loads), MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), _NONE, np.int32)
    allowed = np.full((len(loads), mask_words), -1, np.int32)
    for row, params in enumerate(load.sampling for load in loads):
        assert len(params.bad_words) <= MAX_BAD_WORDS
        for number, word in enumerate(params.bad_words):
            words[row, number, : len(word)] = word[::-1]
        if params.allowed:
            given = np.frombuffer(params.allowed, np.int32)
            allowed[row] = 0
            allowed[row, : len(given)] = given
    return [load.sampling.words_from for load in loads], words, allowed


def _mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)
