"""Products by wide tiles, interpreted, against weights that are dequantised."""

import pytest
import torch

from runtime.kernels.pointwise import curve_of, gelu_mul
from runtime.kernels.triton import products, tiles, wide_tiles
from runtime.kernels.triton.pointwise import gate
from runtime.kernels.triton.wide_tiles import arranged, gated_wide_tiles, wide_products
from runtime.quant.block_types import block_type
from runtime.quant.weight import Compute
from tests.cuda.interpreted import placeless_products
from tests.cuda.test_products import pair, random_rows
from tests.kernels.random_weights import relative_error


@pytest.mark.parametrize("splits", [2, 8])
def test_divided_inputs_are_added(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if some programs have nothing to do: there are five blocks of 128."""
    monkeypatch.setattr(wide_tiles, "splits_of", lambda weight, tiling: splits)
    weight, planar = pair(block_type("Q8_0"), 5, 19)
    x = random_rows(70, weight.shape[1])
    (got,) = wide_products(x, [planar], x.dtype)
    assert relative_error(got, x, weight) < 1e-6


def test_gated_products_of_divided_inputs_are_gated_once_they_are_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the bit; float16 shows where products are rounded."""
    monkeypatch.setattr(wide_tiles, "splits_of", lambda weight, tiling: 2)
    _, planar = pair(block_type("Q5_0"), 2 * 67, 5)
    x, curve = random_rows(65, planar.shape[1]).half(), curve_of(gelu_mul)
    with placeless_products():
        (both,) = wide_products(x, [planar], x.dtype)
        assert torch.equal(gated_wide_tiles(x, planar, curve), gate(curve, *both.chunk(2, dim=1)))


def test_two_elements_of_each_group_of_a_block_are_in_turn() -> None:
    x = torch.arange(2 * 192.0).view(2, 192) + 1
    found = arranged(x, x.dtype)
    assert found.shape == (2, 256)
    expected = torch.cat([x, torch.zeros(2, 64)], dim=1).view(2, 2, 4, 16, 2).transpose(2, 3)
    assert torch.equal(found, expected.reshape(2, 256))


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
