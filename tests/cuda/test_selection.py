"""The kernel that selects experts against its twin, interpreted, and its code."""

import pytest
import torch

from runtime.kernels.selection import highest_twin
from runtime.kernels.triton.selection import highest
from tests.cuda.compiled import compile_all

NAN, INF = torch.nan, torch.inf
ROWS = {
    "ties": [[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, -0.0, 0.0, -0.0, -1.0]],
    "infinities": [[-INF, INF, 0.0, INF, -INF], [-INF] * 5],
    "not numbers": [[1.0, NAN, INF, NAN, 0.0], [NAN] * 5],
    "one": [[7.0]],
}


@pytest.mark.parametrize("name", ROWS)
def test_special_numbers_are_in_the_order_of_the_twin(name: str) -> None:
    values = torch.tensor(ROWS[name])
    for count in range(1, values.shape[1] + 1):
        assert torch.equal(highest(values, count), highest_twin(values, count))


@pytest.mark.parametrize(("n", "count"), [(128, 8), (60, 4), (257, 9)])
def test_random_numbers_are_in_the_order_of_the_twin(n: int, count: int) -> None:
    values = torch.randn(5, 2 * n, generator=torch.Generator().manual_seed(n))
    for some in (values[:, :n], values[:, ::2].round(), values[:, :n].bfloat16()):
        assert torch.equal(highest(some, count), highest_twin(some, count))


def test_kernel_keeps_a_row_in_registers() -> None:
    assert_selection_code(90)


def assert_selection_code(capability: int) -> None:
    code = compile_all("tests.cuda.selection_specimens", capability)["128 experts"]
    assert code.stack == 0 and code.registers <= 40 and code.shared <= 1024
