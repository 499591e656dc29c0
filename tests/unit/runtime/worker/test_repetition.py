"""DRY: penalties against llama.cpp's definition, one token after the other."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from runtime.engine.request import SamplingParams
from runtime.engine.step_plan import SlotLoad
from runtime.kernels.repetitions import LONGEST_REPEAT
from runtime.worker.repetition import (
    RepeatingRows,
    add_penalties,
    longest_repeat,
    repetition_spec,
)
from runtime.worker.slot_table import LoadedRows, SlotTable
from tests.unit.runtime.worker.test_sampler import sample

VOCAB = 70
CONTEXT = 128
BREAKERS = (33, 64)
PLAIN = SamplingParams(
    temperature=0.0,
    dry_multiplier=0.8,
    dry_breakers=np.packbits(
        [token in BREAKERS for token in range(96)], bitorder="little"
    ).tobytes(),
)


def penalties(tokens: list[int], s: SamplingParams) -> np.ndarray:
    """What llama.cpp subtracts from the logits after `tokens`."""
    result = np.zeros(VOCAB)
    last_n = len(tokens) if s.dry_penalty_last_n < 0 else min(s.dry_penalty_last_n, len(tokens))
    newest = tokens[::-1][:last_n]
    limit = next((n for n, token in enumerate(newest) if token in BREAKERS), last_n)
    if last_n <= s.dry_allowed_length or limit < s.dry_allowed_length:
        return result
    lengths: dict[int, int] = {}
    for back in range(1, last_n):
        length = 0
        while back + length < last_n and newest[length] == newest[back + length]:
            length += 1
        length = min(length, limit)
        if length >= s.dry_allowed_length:
            token = newest[back - 1]
            lengths[token] = max(lengths.get(token, 0), length)
    most = int(88.7228391 / np.log(s.dry_base)) if s.dry_base > 1.000001 else 10**9
    for token, length in lengths.items():
        if token not in BREAKERS:
            result[token] = s.dry_multiplier * s.dry_base ** min(
                length - s.dry_allowed_length, most
            )
    return result


def subtracted(tokens: list[list[int]], sampling: list[SamplingParams]) -> np.ndarray:
    """Of one step, row r for slot r, in which other rows have no DRY: [rows, vocab]."""
    rows = len(sampling)
    slots = torch.arange(rows)
    spec = repetition_spec(context_tokens=CONTEXT, vocab_size=VOCAB)
    table = SlotTable(spec, slots=rows, device=torch.device("cpu"))
    arrays = spec.rows([SlotLoad(slot, (), s) for slot, s in enumerate(sampling)])
    table.load(LoadedRows(slots, tuple(map(torch.tensor, arrays))))
    history = torch.zeros(rows, CONTEXT, dtype=torch.int32)
    for row, known in enumerate(tokens):
        history[row, : len(known)] = torch.tensor(known)
    chosen = torch.tensor([row for row, s in enumerate(sampling) if s.repetitive])
    longest = max(map(longest_repeat, sampling))
    window = max(map(len, tokens))
    logits = torch.zeros(rows, VOCAB)
    ends = torch.tensor([len(known) for known in tokens])
    repeating = RepeatingRows(chosen, window, longest)
    add_penalties(table, logits, repeating, slots, ends, history)
    return -logits.numpy()


KINDS = [
    {},
    {"dry_allowed_length": 0, "dry_base": 1.0},
    {"dry_allowed_length": 1, "dry_base": 3.0},
    {"dry_allowed_length": 5},
    {"dry_penalty_last_n": 12},
    {"dry_penalty_last_n": 0},
    {"dry_multiplier": 0.0},
    {"dry_multiplier": 5.0, "dry_base": 1.2, "dry_penalty_last_n": 1000},
    {"dry_base": 100.0},
]


@pytest.mark.parametrize("alphabet", [[1], [1, 2], [1, 2, 3, 33], [5, 33, 64, 69, 7, 8]])
def test_penalties_are_those_of_llama_cpp(alphabet):
    random = np.random.default_rng(1)
    sampling = [replace(PLAIN, **kind) for kind in KINDS * 12]
    tokens = [random.choice(alphabet, 1 + row % 80).tolist() for row in range(len(sampling))]
    found = subtracted(tokens, sampling)
    expected = np.stack([
        penalties(known, s) if s.repetitive else np.zeros(VOCAB)
        for known, s in zip(tokens, sampling, strict=True)
    ])  # fmt: skip
    np.testing.assert_allclose(found, np.minimum(expected, 1e30), rtol=1e-5)
    assert (found > 0).any()


def test_a_repetition_that_goes_on_is_broken_off():
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 6] = 3.0, 2.5
    tokens = [[1, 2, 3, 4, 9, 1, 2, 3]]
    without = replace(PLAIN, dry_multiplier=0.0)
    assert sample(logits.clone(), [without], tokens=tokens).tokens.tolist() == [4]
    assert sample(logits.clone(), [PLAIN], tokens=tokens).tokens.tolist() == [6]


def test_repetitions_are_read_as_far_as_they_matter():
    assert longest_repeat(PLAIN) == 2 + 158  # 1.75**158 is the largest float32
    assert longest_repeat(replace(PLAIN, dry_base=1.0, dry_allowed_length=7)) == 7
    assert longest_repeat(replace(PLAIN, dry_base=1.0001)) == LONGEST_REPEAT
