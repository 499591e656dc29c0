"""Forbidden tokens: the kernel against its twin."""

import numpy as np
import pytest
import torch

from runtime.kernels.draws import forbid, forbid_twin
from tests.kernels.native_kernels import require_native_kernels

ROWS = 9


@pytest.mark.parametrize("vocab", [5, 32, 33, 77, 4100, 140_000])
def test_only_the_bits_that_are_set_keep_their_logits(vocab: int) -> None:
    """One token is allowed in the first row, none in the second, all in the third."""
    draw = np.random.default_rng(vocab)
    logits = draw.standard_normal((ROWS, vocab)).astype(np.float32)
    logits[draw.random(logits.shape) < 0.1] = np.nan
    logits[draw.random(logits.shape) < 0.1] = np.inf
    rows = draw.permutation(ROWS)[:-1]
    allowed = draw.random((len(rows), 32 * -(-vocab // 32))) < draw.random((len(rows), 1))
    allowed[:3] = [[False], [False], [True]]
    allowed[0, vocab - 1] = True
    allowed[1, vocab:] = True  # beyond the vocabulary, without a meaning
    words = torch.from_numpy(np.packbits(allowed, axis=1, bitorder="little").view(np.int32))
    expected = logits.copy()
    expected[rows] = np.where(allowed[:, :vocab], logits[rows], -np.inf)
    for function in (forbid, forbid_twin):
        got = torch.from_numpy(logits.copy())
        function(got, torch.from_numpy(rows), words, len(rows))
        np.testing.assert_array_equal(got.numpy(), expected)
        got = torch.from_numpy(logits.copy())
        function(got, torch.from_numpy(rows), words, 2)
        np.testing.assert_array_equal(got.numpy()[rows[:2]], expected[rows[:2]])
        np.testing.assert_array_equal(got.numpy()[rows[2:]], logits[rows[2:]])


@pytest.mark.parametrize("row", [-1, ROWS])
def test_rows_outside_the_logits_are_refused(row: int) -> None:
    require_native_kernels()
    words = torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(IndexError):
        forbid(torch.zeros(ROWS, 70), torch.tensor([1, row]), words, 2)
