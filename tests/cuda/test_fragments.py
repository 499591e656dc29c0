"""Products by fragments, interpreted, against weights that are dequantised."""

import pytest
import torch

from runtime.kernels.experts import expert_products_twin
from runtime.kernels.triton import fragments, products
from runtime.kernels.triton.fragments import arranged, fragment_products
from runtime.quant.block_types import block_type
from tests.cuda.test_products import CPU, pair, random_rows
from tests.kernels.random_weights import relative_error


@pytest.mark.parametrize("warps", [1, 2, 8])
def test_any_number_of_warps_divides_the_inputs(
    warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if some have less to do: there are 17 blocks of 128, of which the last is not whole."""
    monkeypatch.setattr(fragments, "warps_of", lambda outs, elements: warps)
    weight, planar = pair(block_type("Q8_0"), 5, 66)
    x = random_rows(10, weight.shape[1])
    (got,) = fragment_products(x, [planar], x.dtype)
    assert relative_error(got, x, weight) < 1e-6


def test_pairs_of_a_quarter_are_beside_those_that_are_multiplied_with_them() -> None:
    x = torch.arange(2 * 128.0).view(2, 128)
    found = arranged(x, x.dtype)
    assert found.shape[0] == 1 and found.shape[2:] == (4, 8, 4, 8)
    block = found[0, 0]
    first = torch.tensor([0, 1, 4, 5, 2, 3, 6, 7])
    for quarter in range(4):
        for row in range(2):
            for group in range(4):
                expected = row * 128 + group * 32 + quarter * 8 + first
                assert torch.equal(block[quarter, row, group], expected.float())
    assert not block[:, 2:].any() and not found[0, 1:].any()


@pytest.mark.parametrize("shared", [True, False], ids=["a row", "rows"])
@pytest.mark.parametrize("tokens", [9, 70])
def test_products_of_experts_agree_with_the_twin(shared: bool, tokens: int) -> None:
    """Bundles of 8 and of 64 pairs."""
    used, experts, outs = 2, 3, 5
    weight, _ = pair(block_type("Q4_0"), experts * outs, 5)
    weight = weight.unflatten(experts)
    planar, elements = weight.in_planes(CPU), weight.shape[2]
    x = random_rows(tokens, elements) if shared else random_rows(tokens, used, elements)
    chosen = torch.randint(experts, (tokens, used), generator=torch.Generator().manual_seed(1))
    bias, scale = random_rows(experts, outs), random_rows(tokens, used)
    for options in ({"bias": None, "scale": None}, {"bias": bias, "scale": scale}):
        got = products.experts_product(x.half(), planar, chosen, **options)
        expected = expert_products_twin(x, weight, chosen, **options)
        torch.testing.assert_close(got.float(), expected, rtol=2e-2, atol=2e-2)
