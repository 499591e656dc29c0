"""What only state spaces and selective scans have; see test_recurrent_rules.py."""

import pytest
import torch

from tests.kernels.sequence_steps import Mamba, Mamba2, Rule, Sequences


@pytest.mark.parametrize("rule", [Mamba2(), Mamba()], ids=["state_space", "selective_scan"])
@pytest.mark.parametrize("kernel", ["fast", "twin"])
def test_extreme_steps_stay_finite(rule: Rule, kernel: str) -> None:
    sequences = Sequences(rule, "groups", [100])
    [[steps]] = sequences.columns
    steps[::3], steps[1::3] = 80.0, -90.0
    _, learnt = sequences.step({0: 100}, rule.kernels[kernel])[0]
    torch.testing.assert_close(learnt, sequences.expected(0)[1], rtol=1e-4, atol=1e-2)
