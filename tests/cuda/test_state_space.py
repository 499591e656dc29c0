"""State spaces of CUDA devices in Triton's interpreter, against `transformers`."""

from collections.abc import Iterator

import pytest
import torch

from runtime.kernels.triton.delta import short_convolution
from runtime.kernels.triton.state_space import state_space
from tests.kernels import test_state_space as spaces
from tests.kernels.test_state_space import Sequences, assert_close

# Rows of each step of some sequences: prefill in parts, beside decoding; decoding alone.
STEPS = [{0: 7}, {1: 1, 0: 1, 2: 3}, {0: 4, 1: 6}, {1: 1, 0: 1, 2: 1}]
LENGTHS = [13, 9, 4]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Results are NaN before they are computed."""
    monkeypatch.setitem(spaces.KERNELS, "triton", (short_convolution, state_space))
    monkeypatch.setattr("runtime.kernels.triton.delta.ROWS", 4)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def outputs(shape: str, steps: list[dict[int, int]]) -> list[list[torch.Tensor]]:
    """The results of convolution and space for each sequence."""
    sequences = Sequences(shape, LENGTHS)
    parts: dict[int, list] = {}
    for counts in steps:
        for number, part in sequences.step(counts, "triton").items():
            parts.setdefault(number, []).append(part)
    return [[torch.cat(p) for p in zip(*parts[n], strict=True)] for n in range(len(LENGTHS))]


@pytest.mark.parametrize("shape", ["one_head", "groups", "odd_sizes"])
def test_steps_of_any_length_give_the_result_of_the_whole_sequence(shape: str) -> None:
    for number, results in enumerate(outputs(shape, STEPS)):
        expected = Sequences(shape, LENGTHS).expected(number)
        for one, other in zip(results, expected, strict=True):
            assert_close(one, other[: len(one)])


def test_bits_do_not_depend_on_steps_or_other_sequences() -> None:
    together = outputs("groups", STEPS)
    apart = outputs("groups", [{0: 13}, {1: 8}, {2: 4}])
    for one, other in zip(together, apart, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
