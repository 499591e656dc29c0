"""The kernels of DRY, interpreted, against the twin."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from runtime.kernels import repetitions as dispatch
from runtime.kernels.repetitions import penalise_repetitions_twin
from runtime.kernels.triton import repetitions as kernels
from runtime.worker import repetition
from tests.unit.runtime.worker.test_repetition import CONTEXT, KINDS, PLAIN, subtracted

ALPHABETS = ([1], [1, 2], [1, 2, 3, 33], [5, 33, 64, 69, 7, 8])


@pytest.mark.parametrize("alphabet", ALPHABETS, ids=str)
@pytest.mark.parametrize("columns", [32, 512])
def test_penalties_are_those_of_the_twin(
    columns: int, alphabet: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the window in one block of columns, and in several."""
    monkeypatch.setattr(kernels, "COLUMNS", columns)
    monkeypatch.setattr(kernels, "BLOCK", 64)
    random = np.random.default_rng(7)
    kinds = [*KINDS, {"dry_allowed_length": 300}, {"dry_allowed_length": 60, "dry_base": 1.0}]
    sampling = [replace(PLAIN, **kind) for kind in kinds * 2]
    lengths = [1, CONTEXT - 1, *random.integers(1, CONTEXT, len(sampling) - 2)]
    tokens = [random.choice(alphabet, length).tolist() for length in lengths]
    expected = subtracted(tokens, sampling)
    monkeypatch.setattr(repetition, "penalise_repetitions", kernels.penalise_repetitions)
    found = subtracted(tokens, sampling)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert (found > 0).any() or alphabet == ALPHABETS[-1]


def test_devices_with_kernels_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(dispatch, "has_kernels", lambda device: True)
    monkeypatch.setattr(kernels, "launch", lambda kernel, *_, **__: calls.append(kernel))
    assert not subtracted([[1, 1, 1]], [PLAIN]).any()
    assert calls == [kernels.repetition_kernel, kernels.subtraction_kernel]
    monkeypatch.setattr(repetition, "penalise_repetitions", penalise_repetitions_twin)
    assert torch.from_numpy(subtracted([[1, 1, 1, 1]], [PLAIN])).any()
