"""Recurrent layers of CUDA devices in Triton's interpreter, against `transformers`."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from runtime.kernels.triton.delta import gated_delta, short_convolution
from tests.kernels import test_delta as delta
from tests.kernels.test_delta import Sequences, assert_close, check_sums

# Rows of each step of some sequences: prefill in parts, beside decoding; decoding alone.
STEPS = [{0: 7}, {1: 1, 0: 1, 2: 3}, {0: 4, 1: 6}, {1: 1, 0: 1, 2: 1}]
LENGTHS = [13, 9, 4]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Results are NaN before they are computed."""
    monkeypatch.setitem(delta.KERNELS, "triton", (short_convolution, gated_delta))
    monkeypatch.setattr("runtime.kernels.triton.delta.ROWS", 4)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def outputs(shape: str, steps: list[dict[int, int]], **options) -> list[list[torch.Tensor]]:
    """The results of convolution and rule for each sequence."""
    sequences = Sequences(shape, LENGTHS)
    parts: dict[int, list] = {}
    for counts in steps:
        for number, part in sequences.step(counts, "triton", **options).items():
            parts.setdefault(number, []).append(part)
    return [[torch.cat(p) for p in zip(*parts[n], strict=True)] for n in range(len(LENGTHS))]


@pytest.mark.parametrize(
    ("shape", "tiled"),
    [("one_head", False), ("groups", False), ("groups", True), ("odd_sizes", True)],
)
def test_steps_of_any_length_give_the_result_of_the_whole_sequence(shape: str, tiled: bool) -> None:
    got = outputs(shape, STEPS, tiled=tiled)
    for number, results in enumerate(got):
        expected = Sequences(shape, LENGTHS).expected(number, tiled=tiled)
        for one, other in zip(results, expected, strict=True):
            assert_close(one, other[: len(one)])


def test_results_of_a_convolution_may_be_sums(monkeypatch) -> None:
    check_sums(partial(short_convolution, curved=False), monkeypatch)


def test_bits_do_not_depend_on_steps_or_other_sequences() -> None:
    together = outputs("groups", STEPS)
    apart = outputs("groups", [{0: 13}, {1: 8}, {2: 4}])
    for one, other in zip(together, apart, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
