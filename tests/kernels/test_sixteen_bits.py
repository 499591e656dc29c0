"""F16 and BF16 weights as integers: their values, and products with rounded activations."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.kernels.experts import expert_products
from runtime.kernels.matmul import matmul
from runtime.kernels.matmul import tiled_type as preferred_type
from runtime.kernels.native import kernel_level, library
from runtime.quant.block_types import BlockType, block_type
from runtime.quant.weight import Compute, Weight
from tests.kernels.random_weights import (
    random_rows,
    random_weight,
    relative_error,
    rounded_rows,
)
from tests.tiles import in_tiles, tiled_type

GROUP, LARGEST = 32, 8191
NUMBERS = {"F16": torch.float16, "BF16": torch.bfloat16}
types = pytest.mark.parametrize("name", NUMBERS)


@pytest.fixture
def kernels() -> None:
    tiles, built = tiled_type(block_type("F16")), library()
    if built is None or not built.caravan_matmul_knows(tiles.id, Compute.FINE):
        pytest.skip("the kernels for this processor have no products of integers of 16 bits")


def weight_of(values: Tensor) -> Weight:
    name = next(name for name, dtype in NUMBERS.items() if dtype == values.dtype)
    return Weight(values.view(torch.uint8), block_type(name), tuple(values.shape), Compute.FINE)


def tiled(type: BlockType, outs: int, elements: int, *, seed: int = 0) -> Weight:
    return in_tiles(replace(random_weight(type, outs, elements, seed=seed), compute=Compute.FINE))


@types
def test_weights_differ_by_at_most_half_a_step_of_their_group(name: str) -> None:
    values = (random_rows(48, 10 * GROUP) ** 3).to(NUMBERS[name])
    got, groups = in_tiles(weight_of(values)).dequantize(), values.float().unflatten(-1, (-1, 32))
    top = groups.abs().amax(-1, keepdim=True).expand_as(groups).flatten(-2)
    step = torch.exp2(torch.floor(torch.log2(top)) - 12)
    difference = (got - values.float()).abs()
    assert (difference <= step / 2).all() and (difference > 0).any()
    kept = values.float().abs() >= top / (4 if name == "F16" else 32)
    assert (difference[kept] == 0).all()


@types
def test_the_ends_of_the_range_are_kept(name: str) -> None:
    limits, scale = torch.finfo(NUMBERS[name]), 2.0 ** torch.arange(-60.0, 60.0, 8.0)
    subnormal = (limits.tiny * 2**-9,) if name == "F16" else ()
    for top in (limits.max, 1.0, limits.tiny, *subnormal):
        values = torch.zeros(16, 2 * GROUP, dtype=NUMBERS[name])
        values[:, 3], values[:, 40] = top, -top
        assert torch.equal(in_tiles(weight_of(values)).dequantize(), values.float())
    for factor in scale if name == "BF16" else ():
        values = (random_rows(16, GROUP) * factor).to(NUMBERS[name])
        error = (in_tiles(weight_of(values)).dequantize() - values.float()).abs().max()
        assert error <= values.float().abs().max() * 2.0**-13


@types
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_gives_no_small_number(name: str, bad: float) -> None:
    values = torch.ones(16, GROUP, dtype=NUMBERS[name])
    values[2, 7] = bad
    got = in_tiles(weight_of(values)).dequantize()
    assert got[2, 7].abs() > 1e38 and (got[:2] == 1).all() and (got[3:] == 1).all()


@types
def test_products_are_those_of_rounded_activations(kernels, name: str) -> None:
    for outs, elements in ((16, 32), (48, 512), (80, 96), (208, 1280)):
        weight = tiled(block_type(name), outs, elements, seed=outs)
        for rows in (1, 2, 3, 4, 5, 16, 17, 33, 130):
            x = random_rows(rows, elements, seed=rows)
            got = matmul(x, weight)
            assert relative_error(got, rounded_rows(x, LARGEST), weight) < 1e-6, (outs, rows)
            assert torch.equal(matmul(x, replace(weight, compute=Compute.FAST)), got)
            assert torch.equal(matmul(x, replace(weight, compute=Compute.AUTO)), got)


@types
def test_sums_of_the_largest_integers_do_not_overflow(kernels, name: str) -> None:
    weight = in_tiles(weight_of(torch.full((32, 64), 4 - 2.0**-6).to(NUMBERS[name])))
    x = torch.full((5, 64), -1.0)
    assert relative_error(matmul(x, weight), x, weight) < 1e-6


@types
def test_a_row_has_the_same_bits_alone_and_in_any_batch(kernels, name: str) -> None:
    weight, x = tiled(block_type(name), 48, 3 * 256), random_rows(300, 3 * 256)
    alone = torch.cat([matmul(row, weight) for row in x.split(1)])
    for rows in (2, 3, 4, 7, 16, 33, 127, 128, 129, 255, 257, 300):
        assert torch.equal(matmul(x[-rows:], weight), alone[-rows:]), rows


@types
def test_parts_of_tiles_are_multiplied_as_the_whole(kernels, name: str) -> None:
    weight, x = tiled(block_type(name), 80, 256), random_rows(9, 256)
    whole = matmul(x, weight)
    assert torch.equal(matmul(x, weight.outputs(16, 64)), whole[:, 16:64])
    inner = x[:, 64:192].contiguous()
    got = matmul(inner, weight.inputs(64, 192))
    assert relative_error(got, rounded_rows(inner, LARGEST), weight.inputs(64, 192)) < 1e-6


@types
def test_tiles_are_multiplied_in_float32_if_asked(kernels, name: str) -> None:
    weight, x = (
        replace(tiled(block_type(name), 32, 512), compute=Compute.EXACT),
        random_rows(3, 512),
    )
    got = matmul(x, weight)
    assert relative_error(got, x, weight) < 1e-6


def test_a_row_that_is_not_finite_spoils_no_other_row(kernels) -> None:
    weight, x = tiled(block_type("F16"), 48, 512), random_rows(5, 512)
    expected = matmul(x, weight)
    x[2, 77] = math.inf
    got = matmul(x, weight)
    assert not got[2].isfinite().any()
    assert torch.equal(got[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


@types
def test_experts_compute_the_bits_of_single_matrices(kernels, name: str) -> None:
    experts, outs, elements = 5, 48, 256
    weight = tiled(block_type(name), experts * outs, elements).unflatten(experts)
    for tokens, used in ((1, 2), (9, 3), (200, 4)):
        x = random_rows(tokens, elements)
        drawn = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(1))
        chosen = drawn.argsort(dim=1)[:, :used].contiguous()
        got = expert_products(x, weight, chosen)
        for expert in range(experts):
            matrix = weight.matrices(expert, expert + 1)
            matrix = replace(matrix, data=matrix.data[0], shape=(outs, elements))
            for token, place in (chosen == expert).nonzero().tolist():
                alone = matmul(x[token : token + 1], matrix)[0]
                assert torch.equal(got[token, place], alone)


def test_bfloat16_is_rearranged_unless_the_processor_multiplies_it(kernels) -> None:
    level = kernel_level()
    rows = {compute for compute in Compute if preferred_type(block_type("BF16"), compute) is None}
    if level.endswith("-amx"):
        assert rows == set(Compute)
    else:
        as_bfloats = {Compute.FAST, Compute.AUTO} if level.endswith("-bf16") else set()
        assert rows == {Compute.EXACT, *as_bfloats}
    half = block_type("F16")
    assert {compute for compute in Compute if preferred_type(half, compute) is None} == {
        Compute.EXACT
    }
