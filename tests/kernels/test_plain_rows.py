"""Plain weights that are expanded in registers, and once for all rows: the same bits."""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from runtime.kernels import experts
from runtime.kernels import matmul as matmul_module
from runtime.kernels.cpu_levels import usable_levels
from runtime.kernels.experts import expert_products
from runtime.kernels.matmul import matmul
from runtime.quant.block_types import block_type
from runtime.quant.weight import Compute
from tests.kernels.random_weights import random_weight
from tests.kernels.test_experts import random_choices, random_experts
from tests.kernels.test_native import kernels_of

every_type = pytest.mark.parametrize(
    ("name", "compute"),
    [(name, Compute.EXACT) for name in ("F32", "F16", "BF16")] + [("BF16", Compute.FAST)],
)


@pytest.fixture(params=usable_levels({}), ids=lambda level: level.name)
def expand_in_registers(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[bool], None]]:
    """Chooses the way, which otherwise depends on the processor."""
    kernels = kernels_of(request.param)
    for module in (experts, matmul_module):
        monkeypatch.setattr(module, "library", lambda: kernels)
    chosen = ctypes.c_int.in_dll(kernels, "caravan_expands_in_registers")
    before = chosen.value
    yield lambda value: setattr(chosen, "value", int(value))
    chosen.value = before


@every_type
@pytest.mark.parametrize("elements", [1, 31, 77, 512])
def test_both_ways_give_the_same_bits(
    name: str, compute: Compute, elements: int, expand_in_registers: Callable[[bool], None]
) -> None:
    for outs in (1, 5, 24, 29, 65):
        weight = replace(random_weight(block_type(name), outs, elements), compute=compute)
        for rows in (*range(9, 14), 33):
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
