"""Products by fragments, interpreted, against weights that are dequantised."""

import pytest
import torch

from runtime.kernels.experts import expert_products_twin
from runtime.kernels.pointwise import curve_of, gelu_mul
from runtime.kernels.triton import fragments, products
from runtime.kernels.triton.fragments import arranged, fragment_products, gated_fragments
from runtime.kernels.triton.pointwise import gate
from runtime.quant.block_types import BlockType, block_type
from runtime.quant.weight import Compute
from tests.cuda.interpreted import placeless_products
from tests.cuda.test_products import CPU, pair, planar_types, random_rows
from tests.kernels.random_weights import relative_error


@planar_types
def test_product_agrees_with_the_weights(type: BlockType) -> None:
    weight, planar = pair(type, 3, 256 // type.block_elements + 1)
    x = random_rows(9, weight.shape[1])
    (got,) = fragment_products(x, [planar], x.dtype)
    assert relative_error(got, x, weight) < 1e-6


@pytest.mark.parametrize("rows", [1, 9, 33, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_odd_sizes_agree_with_the_weights(rows: int, dtype: torch.dtype) -> None:
    weight, planar = pair(block_type("Q5_0"), 67, 9)
    wide = random_rows(rows, weight.shape[1] + 32).to(dtype)
    x = wide[:, 16:-16]
    exact = x.double() @ weight.dequantize().to(dtype).double().T
    (got,) = fragment_products(x, [planar], x.dtype)
    assert got.dtype == dtype
    error = (got.double() - exact).abs().max() / exact.abs().max()
    assert error < {torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]


def test_rows_are_rounded_and_results_are_not() -> None:
    weight, planar = pair(block_type("Q6_K"), 5, 1)
    x = random_rows(10, weight.shape[1])
    (got,) = fragment_products(x, [planar], torch.bfloat16)
    assert got.dtype == torch.float32 and not torch.equal(got, got.bfloat16().float())
    assert relative_error(got, x, weight) < 2**-8


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


@pytest.mark.parametrize("rows, size", [(9, 5), (33, 67)])
def test_gated_fragments_are_the_gate_of_both_products(rows: int, size: int) -> None:
    """To the bit; float16 shows where products are rounded."""
    _, planar = pair(block_type("Q5_0"), 2 * size, 3)
    x, curve = random_rows(rows, planar.shape[1]).half(), curve_of(gelu_mul)
    with placeless_products():
        (both,) = fragment_products(x, [planar], x.dtype)
        assert torch.equal(gated_fragments(x, planar, curve), gate(curve, *both.chunk(2, dim=1)))


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


def test_a_few_rows_of_16_bits_are_arranged_once_for_all_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = [pair(block_type(name), 3, 1, Compute.FINE)[1] for name in ("Q4_K", "Q6_K")]
    calls = list[int]()
    monkeypatch.setattr(
        fragments, "arranged", lambda x, dtype: calls.append(len(x)) or arranged(x, dtype)
    )
    x = random_rows(65, 256).half()
    for rows in (8, 9, 64, 65):
        apart = [products.product(x[:rows], weight) for weight in weights]
        assert calls == [rows] * 2 * (9 <= rows <= 64)
        calls.clear()
        for got, alone in zip(products.products(x[:rows], weights), apart, strict=True):
            assert torch.equal(got, alone)
        assert calls == [rows] * (9 <= rows <= 64)
        calls.clear()
    products.products(x[:9].float(), weights)
    assert not calls


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
