"""What only state spaces have; see test_recurrent_rules.py."""

import pytest
import torch

from tests.kernels.sequence_steps import Mamba2, Sequences


@pytest.mark.parametrize("kernel", ["fast", "twin"])
def test_extreme_steps_stay_finite(kernel) -> None:
    sequences = Sequences(Mamba2(), "groups", [100])
    [[steps]] = sequences.columns
    steps[::3], steps[1::3] = 80.0, -90.0
    _, learnt = sequences.step({0: 100}, Mamba2.kernels[kernel])[0]
    torch.testing.assert_close(learnt, sequences.expected(0)[1], rtol=1e-4, atol=1e-2)
