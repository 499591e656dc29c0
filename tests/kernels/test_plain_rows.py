"""Plain weights that are expanded in registers, and once for all rows: the same bits."""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from runtime.kernels.experts import expert_products
from runtime.kernels.matmul import matmul
from runtime.kernels.native import library
from runtime.quant.block_types import Compute, block_type
from tests.kernels.native_kernels import require_native_kernels
from tests.kernels.random_weights import random_weight
from tests.kernels.test_experts import random_choices, random_experts

every_type = pytest.mark.parametrize(
    ("name", "compute"),
    [(name, Compute.EXACT) for name in ("F32", "F16", "BF16")] + [("BF16", Compute.FAST)],
)


@pytest.fixture
def expand_in_registers() -> Iterator[Callable[[bool], None]]:
    """Chooses the way, which otherwise depends on the processor."""
    require_native_kernels()
    kernels = library()
    assert kernels is not None
    chosen = ctypes.c_int.in_dll(kernels, "caravan_expands_in_registers")
    before = chosen.value
    yield lambda value: setattr(chosen, "value", int(value))
    chosen.value = before


@every_type
@pytest.mark.parametrize("elements", [1, 16, 31, 77, 512, 1100])
def test_both_ways_give_the_same_bits(
    name: str, compute: Compute, elements: int, expand_in_registers: Callable[[bool], None]
) -> None:
    for outs in (1, 5, 24, 29, 65):
        weight = replace(random_weight(block_type(name), outs, elements), compute=compute)
        for rows in (*range(9, 18), 33, 130):
            x = torch.randn(rows, elements, generator=torch.Generator().manual_seed(rows))
            expand_in_registers(False)
            expected = matmul(x, weight)
            expand_in_registers(True)
            assert torch.equal(matmul(x, weight), expected), (outs, rows)


@every_type
def test_both_ways_give_the_same_bits_with_experts(
    name: str, compute: Compute, expand_in_registers: Callable[[bool], None]
) -> None:
    weight = replace(random_experts(block_type(name), 65, 77), compute=compute)
    x, chosen = torch.randn(40, 77), random_choices(40, 3)
    expand_in_registers(False)
    expected = expert_products(x, weight, chosen)
    expand_in_registers(True)
    assert torch.equal(expert_products(x, weight, chosen), expected)
