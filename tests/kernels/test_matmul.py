"""Products with quantised weights: the fast path against its twin and against itself."""

from collections.abc import Iterator

import pytest
import torch

from runtime.kernels import matmul as room
from runtime.kernels.matmul import matmul, matmul_twin
from runtime.quant.block_types import BLOCK_TYPES, BlockType, block_type
from runtime.quant.weight import Weight
from tests.block_samples import random_blocks
from tests.kernels.native_kernels import require_native_kernels
from tests.kernels.random_weights import random_weight, relative_error

every_type = pytest.mark.parametrize("type", BLOCK_TYPES.values(), ids=lambda t: t.name)
# Odd numbers of outputs, and as odd a length as the blocks allow, around the sizes of tiles.
OUTS = (1, 3, 24, 65, 130)


def lengths(type: BlockType) -> Iterator[int]:
    if type.block_elements == 1:
        yield from (1, 15, 16, 17, 77, 512, 529, 1100)
    else:
        yield from (type.block_elements * blocks for blocks in (1, 2, 3, 5, 17))


@every_type
def test_native_products_are_as_exact_as_the_twin(type: BlockType) -> None:
    require_native_kernels()
    for seed, elements in enumerate(lengths(type)):
        for outs in OUTS:
            weight = random_weight(type, outs, elements, seed=seed)
            for rows in (1, 3, 4, 7, 8, 23, 33):
                x = torch.randn(rows, elements, generator=torch.Generator().manual_seed(seed))
                got = matmul(x, weight)
                assert got.dtype == torch.float32 and got.shape == (rows, outs)
                assert relative_error(got, x, weight) < 1e-6
            assert relative_error(matmul_twin(x, weight), x, weight) < 1e-6


@every_type
def test_each_weight_equals_that_of_the_twin_to_the_bit(type: BlockType) -> None:
    """One-hot rows select single weights, including denormal and extreme ones."""
    require_native_kernels()
    elements = 77 if type.block_elements == 1 else 512
    data = random_blocks(type, (65, elements // type.block_elements))
    weight = Weight(torch.from_numpy(data), type, (65, elements))
    picked, expected = torch.eye(elements), weight.dequantize().T
    assert torch.equal(matmul(picked, weight), expected)
    assert torch.equal(torch.cat([matmul(row, weight) for row in picked.split(3)]), expected)


@every_type
def test_a_row_has_the_same_bits_alone_and_in_any_batch(type: BlockType) -> None:
    require_native_kernels()
    elements = 529 if type.block_elements == 1 else 3 * 256
    weight = random_weight(type, 50, elements)
    x = torch.randn(140, elements, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([matmul(row, weight) for row in x.split(1)])
    for rows in (*range(1, 71), 127, 128, 129, 140):
        assert torch.equal(matmul(x[-rows:], weight), alone[-rows:]), rows


@pytest.mark.parametrize("name", ["Q4_K", "Q5_0", "IQ2_XS", "I16"])
def test_the_number_of_threads_does_not_change_a_bit(name: str) -> None:
    require_native_kernels()
    weight = random_weight(block_type(name), 300, 512)
    x = torch.randn(9, 512)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = matmul(x, weight), matmul(x[:1], weight)
        torch.set_num_threads(3)
        three = matmul(x, weight), matmul(x[:1], weight)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one[0], three[0]) and torch.equal(one[1], three[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_activations_are_multiplied_in_float32(dtype: torch.dtype) -> None:
    require_native_kernels()
    weight = random_weight(block_type("Q8_0"), 40, 256)
    x = torch.randn(6, 256).to(dtype)
    got = matmul(x, weight)
    assert got.dtype == dtype
    assert torch.equal(got, matmul(x.float(), weight).to(dtype))


def test_activations_and_weights_may_be_views_of_something_larger() -> None:
    weight = random_weight(block_type("Q4_0"), 30, 64)
    part = Weight(weight.data[7:20], weight.type, (13, 64))
    x = torch.randn(5, 200)
    assert relative_error(matmul(x[:, 11:75], part), x[:, 11:75], part) < 1e-6


def test_no_rows_give_no_rows() -> None:
    assert matmul(torch.empty(0, 64), random_weight(block_type("Q8_0"), 5, 64)).shape == (0, 5)


def test_the_twin_gives_the_same_slab_by_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = random_weight(block_type("Q4_K"), 50, 512), torch.randn(3, 512)
    monkeypatch.setattr(room, "SLAB_ELEMENTS", 7 * 512)
    assert matmul_twin(x, weight).shape == (3, 50)
    assert relative_error(matmul_twin(x, weight), x, weight) < 1e-6


def test_the_twin_is_used_without_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = random_weight(block_type("Q6_K"), 9, 256), torch.randn(3, 256)
    monkeypatch.setattr(room, "library", lambda: None)
    assert torch.equal(matmul(x, weight), matmul_twin(x, weight))
