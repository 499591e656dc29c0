"""Products by wide tiles, interpreted, against weights that are dequantised."""

import pytest
import torch

from runtime.kernels.pointwise import curve_of, gelu_mul
from runtime.kernels.triton import products, tiles, wide_tiles
from runtime.kernels.triton.pointwise import gate
from runtime.kernels.triton.wide_tiles import arranged, gated_wide_tiles, wide_products
from runtime.quant.block_types import BlockType, block_type
from runtime.quant.weight import Compute
from tests.cuda.interpreted import placeless_products
from tests.cuda.test_products import pair, planar_types, random_rows
from tests.kernels.random_weights import relative_error


@planar_types
def test_product_agrees_with_the_weights(type: BlockType) -> None:
    weight, planar = pair(type, 3, 256 // type.block_elements + 1)
    x = random_rows(65, weight.shape[1])
    (got,) = wide_products(x, [planar], x.dtype)
    assert relative_error(got, x, weight) < 1e-6


@pytest.mark.parametrize("rows", [65, 128, 129, 200, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_odd_sizes_agree_with_the_weights(rows: int, dtype: torch.dtype) -> None:
    weight, planar = pair(block_type("Q5_0"), 131, 9)
    wide = random_rows(rows, weight.shape[1] + 32).to(dtype)
    x = wide[:, 16:-16]
    exact = x.double() @ weight.dequantize().to(dtype).double().T
    (got,) = wide_products(x, [planar], x.dtype)
    assert got.dtype == dtype
    error = (got.double() - exact).abs().max() / exact.abs().max()
    assert error < {torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.parametrize("splits", [2, 8])
def test_divided_inputs_are_added(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if some programs have nothing to do: there are five blocks of 128."""
    monkeypatch.setattr(wide_tiles, "splits_of", lambda weight, tiling: splits)
    weight, planar = pair(block_type("Q8_0"), 5, 19)
    x = random_rows(70, weight.shape[1])
    (got,) = wide_products(x, [planar], x.dtype)
    assert relative_error(got, x, weight) < 1e-6


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("rows", [65, 129])
def test_gated_wide_tiles_are_the_gate_of_both_products(
    rows: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit; float16 shows where products are rounded."""
    monkeypatch.setattr(wide_tiles, "splits_of", lambda weight, tiling: splits)
    _, planar = pair(block_type("Q5_0"), 2 * 67, 5)
    x, curve = random_rows(rows, planar.shape[1]).half(), curve_of(gelu_mul)
    with placeless_products():
        (both,) = wide_products(x, [planar], x.dtype)
        assert torch.equal(gated_wide_tiles(x, planar, curve), gate(curve, *both.chunk(2, dim=1)))


def test_two_elements_of_each_group_of_a_block_are_in_turn() -> None:
    x = torch.arange(2 * 192.0).view(2, 192) + 1
    found = arranged(x, x.dtype)
    assert found.shape == (2, 256)
    expected = torch.cat([x, torch.zeros(2, 64)], dim=1).view(2, 2, 4, 16, 2).transpose(2, 3)
    assert torch.equal(found, expected.reshape(2, 256))


def test_rows_of_16_bits_are_arranged_once_for_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [pair(block_type(name), 3, 1, Compute.FINE)[1] for name in ("Q4_K", "Q6_K")]
    calls = list[int]()
    monkeypatch.setattr(
        wide_tiles, "arranged", lambda x, dtype: calls.append(len(x)) or arranged(x, dtype)
    )
    x = random_rows(257, 256).half()
    for rows in (64, 65, 256, 257):
        apart = [products.product(x[:rows], weight) for weight in weights]
        assert calls == [rows] * 2 * (65 <= rows <= 256)
        calls.clear()
        for got, alone in zip(products.products(x[:rows], weights), apart, strict=True):
            assert torch.equal(got, alone)
        assert calls == [rows] * (65 <= rows <= 256)
        calls.clear()
    products.products(x[:65].float(), weights)
    assert not calls


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)], ids=str)
def test_other_devices_than_hopper_have_tiles_and_dense_products(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wide_tiles, "capability", lambda device: capability)
    monkeypatch.setattr(wide_tiles, "arranged", None)
    _, planar = pair(block_type("Q4_K"), 6, 1, Compute.FINE)
    x, curve = random_rows(129, planar.shape[1]).half() / 64, curve_of(gelu_mul)
    for rows, multiplied in ((65, tiles.tile_product), (129, products._dense_product)):
        expected = multiplied(x[:rows], planar)
        assert torch.equal(products.product(x[:rows], planar), expected)
        assert torch.equal(products.products(x[:rows], [planar])[0], expected)
        assert products.gated_product(x[:rows], planar, curve).shape == (rows, 3)
