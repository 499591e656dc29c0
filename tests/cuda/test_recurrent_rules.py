"""Recurrent layers of CUDA devices in Triton's interpreter, against `transformers`."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from runtime.kernels.triton.delta import gated_delta, short_convolution
from runtime.kernels.triton.selective_scan import selective_scan
from runtime.kernels.triton.state_space import state_space
from runtime.kernels.triton.wkv import wkv7
from tests.kernels.sequence_steps import RULES, Kernels, Sequences
from tests.kernels.test_delta import check_sums

# Rows of each step of some sequences: prefill in parts, beside decoding; decoding alone.
STEPS = [{0: 7}, {1: 1, 0: 1, 2: 3}, {0: 4, 1: 6}, {1: 1, 0: 1, 2: 1}]
LENGTHS = [13, 9, 4]
KERNELS: dict[str, Kernels] = {
    **dict.fromkeys(
        ("delta", "tiled delta", "delta of elements"), (short_convolution, gated_delta)
    ),
    "state space": (short_convolution, state_space),
    "selective scan": (short_convolution, selective_scan),
    "wkv7": (short_convolution, wkv7),
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Results are NaN before they are computed."""
    monkeypatch.setattr("runtime.kernels.triton.delta.ROWS", 4)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        ("delta", "one_head"),
        ("delta", "groups"),
        ("tiled delta", "groups"),
        ("tiled delta", "odd_sizes"),
        ("delta of elements", "odd_sizes"),
        ("state space", "one_head"),
        ("state space", "groups"),
        ("state space", "odd_sizes"),
        ("selective scan", "one_head"),
        ("selective scan", "odd_sizes"),
        ("wkv7", "one_head"),
        ("wkv7", "odd_sizes"),
    ],
)
def test_steps_of_any_length_give_the_result_of_the_whole_sequence(rule: str, shape: str) -> None:
    sequences = Sequences(RULES[rule], shape, LENGTHS)
    found = sequences.steps(STEPS, KERNELS[rule])
    assert len(found) == len(LENGTHS)
    for number, got in found.items():
        for one, other in zip(got, sequences.expected(number), strict=True):
            sequences.assert_close(one, other[: len(one)])


def test_results_of_a_convolution_may_be_sums() -> None:
    check_sums(partial(short_convolution, curved=False))


@pytest.mark.parametrize("rule", ["delta", "state space", "selective scan", "wkv7"])
def test_bits_do_not_depend_on_steps_or_other_sequences(rule: str) -> None:
    together, apart = (
        Sequences(RULES[rule], "groups", LENGTHS).steps(steps, KERNELS[rule])
        for steps in (STEPS, [{0: 13}, {1: 8}, {2: 4}])
    )
    assert together.keys() == apart.keys()
    for number, one in together.items():
        assert all(torch.equal(*pair) for pair in zip(one, apart[number], strict=True))
