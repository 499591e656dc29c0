"""Products of BF16 weights with activations as one bfloat16, or as the sum of two."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.kernels.matmul import matmul
from runtime.quant.block_types import block_type
from runtime.quant.weight import Compute, Weight
from tests.kernels.native_kernels import has_tile_registers, require_native_kernels
from tests.kernels.random_weights import random_rows, random_weight, relative_error

ELEMENTS = (1, 15, 16, 31, 32, 33, 77, 512, 529, 1100)
ways = pytest.mark.parametrize("compute", [Compute.FAST, Compute.FINE])
TILE = 16


def bfloat_weight(outs: int, elements: int, compute: Compute) -> Weight:
    return replace(random_weight(block_type("BF16"), outs, elements), compute=compute)


def planes_of(x: Tensor, count: int) -> list[Tensor]:
    """The nearest bfloat16, and the nearest to what remains."""
    planes = []
    for _ in range(count):
        planes.append(x.bfloat16().float())
        x = x - planes[-1]
    return planes


def seen_activations(x: Tensor, compute: Compute, outs: int) -> Tensor:
    """x as the products see it, in float64."""
    if compute is Compute.FAST:
        return x.bfloat16().double()
    if has_tile_registers() and outs >= TILE:
        return sum(plane.double() for plane in planes_of(x, 2))
    return x.double()


@ways
@pytest.mark.parametrize("elements", ELEMENTS)
def test_products_are_those_of_rounded_activations(elements: int, compute: Compute) -> None:
    require_native_kernels()
    for outs in (1, 3, 16, 24, 33, 65):
        weight = bfloat_weight(outs, elements, compute)
        for rows in (1, 3, 4, 8, 9, 33):
            x = random_rows(rows, elements)
            seen = seen_activations(x, compute, outs)
            assert relative_error(matmul(x, weight), seen, weight) < 1e-6, (outs, rows)


@ways
@pytest.mark.parametrize("elements", ELEMENTS)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(elements: int, compute: Compute) -> None:
    require_native_kernels()
    weight, x = bfloat_weight(150, elements, compute), random_rows(300, elements)
    alone = torch.cat([matmul(row, weight) for row in x.split(1)])
    for rows in (*range(2, 34), 127, 128, 129, 140, 255, 256, 257, 300):
        assert torch.equal(matmul(x[-rows:], weight), alone[-rows:]), rows


@ways
@pytest.mark.parametrize("bad", [math.nan, math.inf, 3.4e38])
def test_activations_beyond_bfloat16_affect_only_their_row(bad: float, compute: Compute) -> None:
    """3.4e38 is rounded to infinity."""
    require_native_kernels()
    weight, x = bfloat_weight(40, 512, compute), random_rows(20, 512)
    expected = matmul(x, weight)
    x[2, 77] = bad
    got = matmul(x, weight)
    if has_tile_registers() or compute is Compute.FAST or bad != 3.4e38:
        assert not got[2].isfinite().any()
    assert torch.equal(got[3:], expected[3:]) and torch.equal(got[:2], expected[:2])


@ways
def test_tile_registers_add_products_in_a_fixed_order(compute: Compute) -> None:
    """As Intel defines TDPBF16PS: fused sums of even and of odd products from zero, for each group
    of 32, are added to the result. Products of two bfloat16 are exact in float32."""
    require_native_kernels()
    if not has_tile_registers():
        pytest.skip("the kernels for this processor have no tile registers")
    rows, outs, groups = 19, 35, 5
    weight, x = bfloat_weight(outs, 32 * groups, compute), random_rows(rows, 32 * groups)
    numbers, planes = weight.dequantize(), planes_of(x, 2 if compute is Compute.FINE else 1)
    expected = torch.zeros(rows, outs)
    for group in range(0, 32 * groups, 32):
        for plane in planes:
            sums = [torch.zeros(rows, outs), torch.zeros(rows, outs)]
            for k in range(group, group + 32):
                sums[k % 2] += plane[:, k, None] * numbers[None, :, k]
            expected += sums[0] + sums[1]
    assert torch.equal(matmul(x, weight), expected)


def test_auto_is_exact_to_16_bits_with_tile_registers() -> None:
    """Elsewhere `fine` is `exact`, and `auto` is `fast` where bfloat16 are multiplied."""
    require_native_kernels()
    x = random_rows(5, 512)
    of = {c: matmul(x, bfloat_weight(40, 512, c)) for c in Compute}
    if has_tile_registers():
        assert torch.equal(of[Compute.AUTO], of[Compute.FINE])
        assert relative_error(of[Compute.FINE], x, bfloat_weight(40, 512, Compute.EXACT)) < 2**-16
    else:
        assert torch.equal(of[Compute.FINE], of[Compute.EXACT])
        assert any(torch.equal(of[Compute.AUTO], of[c]) for c in (Compute.EXACT, Compute.FAST))
    assert not torch.equal(of[Compute.EXACT], of[Compute.FAST])
