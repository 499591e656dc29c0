"""Products of BF16 weights with activations that are rounded to bfloat16."""

import math
from dataclasses import replace

import pytest
import torch

from runtime.kernels.matmul import matmul
from runtime.quant.block_types import Compute, Weight, block_type
from tests.kernels.native_kernels import require_native_kernels
from tests.kernels.random_weights import random_weight, relative_error

ELEMENTS = (1, 15, 16, 31, 32, 33, 77, 512, 529, 1100)


def bfloat_weight(outs: int, elements: int, compute: Compute) -> Weight:
    return replace(random_weight(block_type("BF16"), outs, elements), compute=compute)


def random_rows(rows: int, elements: int) -> torch.Tensor:
    return torch.randn(rows, elements, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("elements", ELEMENTS)
def test_products_are_those_of_rounded_activations(elements: int) -> None:
    require_native_kernels()
    for outs in (1, 3, 24, 65):
        weight = bfloat_weight(outs, elements, Compute.FAST)
        for rows in (1, 3, 4, 8, 9, 33):
            x = random_rows(rows, elements)
            assert relative_error(matmul(x, weight), x.bfloat16().float(), weight) < 1e-6


@pytest.mark.parametrize("elements", ELEMENTS)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(elements: int) -> None:
    require_native_kernels()
    weight, x = bfloat_weight(50, elements, Compute.FAST), random_rows(140, elements)
    alone = torch.cat([matmul(row, weight) for row in x.split(1)])
    for rows in (*range(2, 34), 127, 128, 129, 140):
        assert torch.equal(matmul(x[-rows:], weight), alone[-rows:]), rows


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3.4e38])
def test_activations_beyond_bfloat16_affect_only_their_row(bad: float) -> None:
    """3.4e38 is rounded to infinity."""
    require_native_kernels()
    weight, x = bfloat_weight(40, 512, Compute.FAST), random_rows(20, 512)
    expected = matmul(x, weight)
    x[2, 77] = bad
    got = matmul(x, weight)
    assert not got[2].isfinite().any()
    assert torch.equal(got[3:], expected[3:]) and torch.equal(got[:2], expected[:2])


@pytest.mark.parametrize("compute", [Compute.FINE, Compute.AUTO])
def test_products_without_bfloat16_kernels_are_exact_or_fast(compute: Compute) -> None:
    require_native_kernels()
    x = random_rows(5, 512)
    of = {c: matmul(x, bfloat_weight(40, 512, c)) for c in Compute}
    assert not torch.equal(of[Compute.EXACT], of[Compute.FAST])
    allowed = (Compute.EXACT,) if compute is Compute.FINE else (Compute.EXACT, Compute.FAST)
    assert any(torch.equal(of[compute], of[each]) for each in allowed)
