"""Products by integers: against products of activations rounded by their definition."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.kernels.experts import expert_products
from runtime.kernels.matmul import matmul
from runtime.quant.block_types import BLOCK_TYPES, MXFP4_PAIRS, BlockType, block_type
from runtime.quant.weight import Compute, Weight
from tests.kernels.native_kernels import has_tile_registers, require_integer_products
from tests.kernels.random_weights import (
    random_rows,
    random_weight,
    relative_error,
    rounded_rows,
)
from tests.tiles import in_tiles

NAMES = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ4_NL", "IQ4_XS", "MXFP4",
)  # fmt: skip
TYPES = (*map(block_type, NAMES), MXFP4_PAIRS)
integer_types = pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
other_types = pytest.mark.parametrize(
    "type", [t for t in BLOCK_TYPES.values() if t not in TYPES], ids=lambda t: t.name
)
computes = pytest.mark.parametrize("compute", [Compute.FINE, Compute.FAST], ids=lambda c: c.name)
LARGEST = {Compute.FINE: 127 * 128, Compute.FAST: 127}
# Fewer outputs than any vector has lanes are computed in floats.
LANES = 16


def integer_weight(
    type: BlockType, outs: int, elements: int, compute: Compute, *, seed: int = 0
) -> Weight:
    return replace(random_weight(type, outs, elements, seed=seed), compute=compute)


def rounded(x: Tensor, compute: Compute) -> Tensor:
    return rounded_rows(x, LARGEST[compute])


@computes
@integer_types
def test_products_are_those_of_rounded_activations(type: BlockType, compute: Compute) -> None:
    require_integer_products()
    for seed, blocks in enumerate((1, 2, 3, 9)):
        elements = blocks * type.block_elements
        for outs in (16, 17, 31, 32, 65, 100):
            weight = integer_weight(type, outs, elements, compute, seed=seed)
            for rows in (1, 2, 5, 16, 33, 97):
                x = random_rows(rows, elements, seed=rows)
                got = matmul(x, weight)
                assert relative_error(got, rounded(x, compute), weight) < 1e-6, (outs, rows)


@computes
@integer_types
def test_tiles_have_the_bits_of_rows(type: BlockType, compute: Compute) -> None:
    """Also with few blocks, which are loaded in advance as a whole; parts of a larger tensor; and
    numbers of tiles that are no multiple of those that are read in turn."""
    require_integer_products()
    for outs, elements in ((16, 256), (48, 512), (80, 2048), (208, 1280)):
        weight = integer_weight(type, outs, elements, compute, seed=outs)
        tiles = in_tiles(weight)
        for rows in (1, 2, 3, 4, 7, 15, 16, 17, 33, 130):
            x = random_rows(rows, elements, seed=rows)
            assert torch.equal(matmul(x, tiles), matmul(x, weight)), (outs, rows)
            inner = x[:, 256:].contiguous()
            some = matmul(inner, tiles.inputs(256, elements).outputs(16, outs))
            expected = matmul(inner, weight.inputs(256, elements).outputs(16, outs))
            assert torch.equal(some, expected), (outs, rows)


@integer_types
def test_tiles_are_multiplied_in_float32_if_asked(type: BlockType) -> None:
    require_integer_products()
    weight = integer_weight(type, 32, 512, Compute.EXACT)
    x = random_rows(3, 512)
    assert relative_error(matmul(x, in_tiles(weight)), x, weight) < 1e-6


@computes
@integer_types
def test_a_row_has_the_same_bits_alone_and_in_any_batch(type: BlockType, compute: Compute) -> None:
    require_integer_products()
    weight = integer_weight(type, 50, 3 * 256, compute)
    x = random_rows(300, 3 * 256)
    alone = torch.cat([matmul(row, weight) for row in x.split(1)])
    for rows in (2, 3, 4, 7, 16, 33, 127, 128, 129, 255, 257, 300):
        assert torch.equal(matmul(x[-rows:], weight), alone[-rows:]), rows


@computes
@pytest.mark.parametrize("name", ["Q4_K", "Q5_0", "Q6_K"])
def test_the_number_of_threads_does_not_change_a_bit(name: str, compute: Compute) -> None:
    require_integer_products()
    weight, x = integer_weight(block_type(name), 300, 512, compute), random_rows(9, 512)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append((matmul(x, weight), matmul(x[:1], weight)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@computes
@other_types
def test_types_without_integer_kernels_are_computed_in_floats(
    type: BlockType, compute: Compute
) -> None:
    require_integer_products()
    if type.name == "BF16" and (compute is Compute.FAST or has_tile_registers()):
        pytest.skip("computed in bfloat16")
    weight, x = random_weight(type, 40, 512), random_rows(5, 512)
    assert torch.equal(matmul(x, replace(weight, compute=compute)), matmul(x, weight))


@integer_types
def test_unless_chosen_otherwise_activations_have_15_bits(type: BlockType) -> None:
    require_integer_products()
    weight, x = integer_weight(type, 40, 512, Compute.AUTO), random_rows(5, 512)
    assert torch.equal(matmul(x, weight), matmul(x, replace(weight, compute=Compute.FINE)))


@computes
def test_fewer_outputs_than_lanes_are_as_exact_as_floats(compute: Compute) -> None:
    require_integer_products()
    for outs in range(1, LANES):
        weight, x = integer_weight(block_type("Q4_0"), outs, 64, compute), random_rows(3, 64)
        allowed = 1e-6 if outs < 4 else 1 / LARGEST[compute]
        assert relative_error(matmul(x, weight), x, weight) < allowed


@computes
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_gives_no_finite_number_and_spoils_no_other_row(
    bad: float, compute: Compute
) -> None:
    require_integer_products()
    weight, x = integer_weight(block_type("Q4_K"), 40, 512, compute), random_rows(5, 512)
    expected = matmul(x, weight)
    x[2, 77] = bad
    got = matmul(x, weight)
    assert not got[2].isfinite().any()
    assert torch.equal(got[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


@computes
@integer_types
def test_zeros_and_the_ends_of_the_range_of_floats(type: BlockType, compute: Compute) -> None:
    require_integer_products()
    weight = integer_weight(type, 40, 512, compute)
    assert torch.equal(matmul(torch.zeros(2, 512), weight), torch.zeros(2, 40))
    assert matmul(torch.full((1, 512), 1e-42), weight).abs().max() < 1e-30
    large = random_rows(2, 512) * 1e30
    assert relative_error(matmul(large, weight), rounded(large, compute), weight) < 1e-6


@computes
@integer_types
def test_experts_compute_the_bits_of_single_matrices(type: BlockType, compute: Compute) -> None:
    require_integer_products()
    experts, outs, elements = 5, 48, 256
    flat = integer_weight(type, experts * outs, elements, compute)
    weight = replace(flat, data=flat.data.view(experts, outs, -1), shape=(experts, outs, elements))
    for tokens, used in ((1, 2), (9, 3), (200, 4)):
        x = random_rows(tokens, elements)
        drawn = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(1))
        chosen = drawn.argsort(dim=1)[:, :used].contiguous()
        scale, bias = random_rows(tokens, used, seed=2), random_rows(experts, outs, seed=3)
        got = expert_products(x, weight, chosen, bias=bias, scale=scale)
        tiles = expert_products(x, in_tiles(weight), chosen, bias=bias, scale=scale)
        assert torch.equal(tiles, got)
        for expert in range(experts):
            matrix = replace(weight, data=weight.data[expert], shape=(outs, elements))
            for token, place in (chosen == expert).nonzero().tolist():
                row = x[token : token + 1] * scale[token, place]
                alone = matmul(row, matrix)[0] + bias[expert]
                assert torch.equal(got[token, place], alone)
