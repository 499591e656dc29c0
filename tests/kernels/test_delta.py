"""What only the gated delta rule and its convolution have; see test_recurrent_rules.py."""

from collections.abc import Callable
from functools import partial

import pytest
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

from runtime.kernels.delta import gated_delta, short_convolution, short_convolution_twin
from tests.kernels.sequence_steps import GatedDelta, Sequences


def check_sums(convolve: Callable[..., Tensor]) -> None:
    """A convolution whose results are sums, in steps of two sequences."""
    sequences = Sequences(GatedDelta(), "groups", [9, 3])
    got, _ = sequences.steps([{0: 4}, {1: 3, 0: 1}, {0: 4}], (convolve, gated_delta))[0]
    inputs, factors = sequences.mixed[0].t()[None], sequences.weight.t()
    expected = causal_conv1d_fn(inputs, factors, None, activation=None)[0].t()
    sequences.assert_close(got, expected)


@pytest.mark.parametrize(
    "convolve", [partial(short_convolution, curved=False), short_convolution_twin]
)
def test_results_of_a_convolution_may_be_sums(convolve) -> None:
    check_sums(convolve)


@pytest.mark.parametrize("kernel", ["fast", "twin"])
def test_extreme_gates_stay_finite(kernel) -> None:
    sequences = Sequences(GatedDelta(), "groups", [100])
    [alphas], [betas] = sequences.columns
    alphas[::3], betas[::2] = 80.0, -90.0
    alphas[1::3], betas[1::2] = -90.0, 90.0
    _, learnt = sequences.step({0: 100}, GatedDelta.kernels[kernel])[0]
    sequences.assert_close(learnt, sequences.expected(0)[1])
