"""Kernels for products with weights in planes, interpreted, against their specification."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from runtime.kernels import experts as expert_kernels
from runtime.kernels import matmul, pointwise
from runtime.kernels.activations import MOST_ROUNDED_ROWS, RoundedActivations
from runtime.kernels.experts import expert_products_twin
from runtime.kernels.matmul import gated_matmul, gated_matmul_twin
from runtime.kernels.pointwise import curve_of, gelu_mul, silu_mul, silu_mul_twin
from runtime.kernels.triton import fragments, products, tiles, vector, wide_tiles
from runtime.kernels.triton.bundles import bundles_of
from runtime.kernels.triton.fragments import fragment_products
from runtime.kernels.triton.pointwise import gate
from runtime.kernels.triton.products import experts_product, gated_product, product
from runtime.kernels.triton.rounded import planes_of
from runtime.kernels.triton.tiles import tile_product
from runtime.kernels.triton.vector import vector_products
from runtime.kernels.triton.wide_tiles import wide_products
from runtime.quant.block_types import BlockType, block_type
from runtime.quant.weight import PLANAR_TYPES, Compute, Weight
from tests.cuda.interpreted import placeless_products
from tests.kernels.random_weights import random_weight, relative_error
from tests.kernels.test_integers import rounded

CPU = torch.device("cpu")
planar_types = pytest.mark.parametrize("type", PLANAR_TYPES.values(), ids=lambda t: t.blocks.name)


def random_rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def pair(
    type: BlockType, outs: int, blocks: int, compute: Compute = Compute.EXACT
) -> tuple[Weight, Weight]:
    """The same weights in blocks and in planes."""
    source = type.blocks or type
    weight = replace(random_weight(source, outs, blocks * type.block_elements), compute=compute)
    return weight, weight.in_planes(CPU)


@planar_types
def test_vector_product_is_that_of_rounded_activations(type: BlockType) -> None:
    check_vectors(type, Compute.FINE, rows=2)


@pytest.mark.parametrize("name", ["Q4_K", "NVFP4"])
def test_fast_products_round_activations_to_one_plane_of_integers(name: str) -> None:
    check_vectors(PLANAR_TYPES[name], Compute.FAST, rows=1)


def check_vectors(type: BlockType, compute: Compute, *, rows: int) -> None:
    weight, planar = pair(type, 3, 256 // type.block_elements + 1, compute)
    x = random_rows(rows, weight.shape[1])
    (got,) = vector_products(x, (planar,))
    assert relative_error(got, rounded(x, compute), weight) < 1e-6


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_products_of_one_input_round_it_once(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are few rows; more of them are not rounded."""
    weights = [pair(block_type(name), 3, 1, Compute.FINE)[1] for name in ("Q4_K", "Q6_K", "Q4_K")]
    x, calls = random_rows(rows, 256), list[int]()
    expected = [product(x, weight) for weight in weights]
    round = vector.rounded
    monkeypatch.setattr(vector, "rounded", lambda *a: calls.append(1) or round(*a))
    for got, alone in zip(products.products(x, weights), expected, strict=True):
        assert torch.equal(got, alone)
    assert len(calls) == (rows <= MOST_ROUNDED_ROWS)


@pytest.mark.parametrize("compute", [Compute.FINE, Compute.FAST], ids=lambda c: c.name)
def test_products_take_the_integers_of_a_norm(
    compute: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the same number of planes; also low-rank additions and experts do."""
    _, planar = pair(block_type("Q5_0"), 6, 3, compute)
    x, curve = random_rows(2, planar.shape[1]), curve_of(silu_mul)
    given = RoundedActivations(x, vector.rounded(x, planes_of(compute)))
    experts, chosen = planar.unflatten(2), torch.tensor([[1], [0]])
    calls = [
        lambda x: product(x, planar),
        lambda x: products.products(x, [planar, planar])[1],
        lambda x: gated_product(x, planar, curve),
        lambda x: experts_product(x, experts, chosen, None, None),
    ]
    expected = [call(x) for call in calls]
    monkeypatch.setattr(vector, "rounded", None)
    assert all(map(torch.equal, [call(given) for call in calls], expected))


def test_other_products_take_the_rows_themselves() -> None:
    """Experts whose inputs are scaled, a weight with other planes, and tiles."""
    _, planar = pair(block_type("Q5_0"), 6, 3, Compute.FINE)
    x = random_rows(2, planar.shape[1])
    given = RoundedActivations(x, vector.rounded(x, planes_of(Compute.FAST)))
    experts, chosen, scale = planar.unflatten(2), torch.tensor([[1], [0]]), random_rows(2, 1)
    for call in (
        lambda x: product(x, planar),
        lambda x: product(x, replace(planar, deterministic=True)),
        lambda x: experts_product(x, experts, chosen, None, scale),
        lambda x: experts_product(x, replace(experts, compute=Compute.EXACT), chosen, None, None),
        lambda x: matmul.matmul(x, random_weight(block_type("F32"), 3, planar.shape[1])),
    ):
        assert torch.equal(call(given), call(x))


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_row_has_the_same_bits_alone_and_among_others(name: str) -> None:
    _, planar = pair(block_type(name), 2, 2, Compute.FINE)
    x = random_rows(8, planar.shape[1])
    together = product(x, planar)
    assert torch.equal(product(x[6:7], planar), together[6:7])
    assert torch.equal(product(x[5:8], planar), together[5:8])


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_activation_that_is_not_finite_spoils_its_row_only(bad: float) -> None:
    _, planar = pair(block_type("Q4_0"), 2, 3, Compute.FINE)
    x = random_rows(2, planar.shape[1])
    x[1, 40] = bad
    got = product(x, planar)
    assert got[0].isfinite().all() and not got[1].isfinite().any()


def test_rows_of_zeros_and_of_tiny_numbers_have_small_products() -> None:
    _, planar = pair(block_type("Q8_0"), 2, 3, Compute.FINE)
    x = torch.zeros(3, planar.shape[1])
    x[1], x[2] = 1e-40, 1e-30
    got = product(x, planar)
    assert torch.equal(got[0], torch.zeros(2)) and got.isfinite().all()
    assert relative_error(got[2:] * 1e30, x[2:] * 1e30, planar) < 1e-5


MULTIPLY = {
    "fragments": lambda x, weight: fragment_products(x, [weight], x.dtype)[0],
    "tiles": tile_product,
    "wide tiles": lambda x, weight: wide_products(x, [weight], x.dtype)[0],
}


@pytest.mark.parametrize(
    ("kernel", "rows"), [("fragments", 9), ("tiles", 9), ("wide tiles", 65)], ids=str
)
@planar_types
def test_matrix_products_agree_with_the_weights(type: BlockType, kernel: str, rows: int) -> None:
    weight, planar = pair(type, 3, 256 // type.block_elements + 1)
    x = random_rows(rows, weight.shape[1])
    assert relative_error(MULTIPLY[kernel](x, planar), x, weight) < 1e-6


@pytest.mark.parametrize(
    ("kernel", "rows", "dtype"),
    [
        *(("tiles", rows, torch.float32) for rows in (1, 9, 33, 70)),
        *(("tiles", rows, torch.float16) for rows in (1, 64, 70, 130, 257)),
        *(("tiles", rows, torch.bfloat16) for rows in (9, 70)),
        *(("fragments", rows, torch.float16) for rows in (1, 9, 33, 64)),
        ("fragments", 33, torch.bfloat16),
        *(("wide tiles", rows, torch.float16) for rows in (65, 128, 129, 200, 256)),
        ("wide tiles", 129, torch.bfloat16),
    ],
    ids=str,
)
def test_odd_sizes_agree_with_the_weights(kernel: str, rows: int, dtype: torch.dtype) -> None:
    weight, planar = pair(block_type("Q5_0"), 131 if kernel == "wide tiles" else 67, 9)
    wide = random_rows(rows, weight.shape[1] + 32).to(dtype)
    x = wide[:, 16:-16]
    exact = x.double() @ weight.dequantize().to(dtype).double().T
    got = MULTIPLY[kernel](x, planar)
    assert got.dtype == dtype
    error = (got.double() - exact).abs().max() / exact.abs().max()
    assert error < {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.parametrize(
    ("module", "least", "most"),
    [(fragments, 9, 64), (wide_tiles, 65, 256)],
    ids=["fragments", "wide tiles"],
)
def test_rows_of_16_bits_are_arranged_once_for_all_weights(
    module: ModuleType, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [pair(block_type(name), 3, 1, Compute.FINE)[1] for name in ("Q4_K", "Q6_K")]
    calls, arranged = list[int](), module.arranged
    monkeypatch.setattr(
        module, "arranged", lambda x, dtype: calls.append(len(x)) or arranged(x, dtype)
    )
    x = random_rows(most + 1, 256).half()
    for rows, once in ((least - 1, False), (least, True), (most, True), (most + 1, False)):
        apart = [product(x[:rows], weight) for weight in weights]
        assert calls == [rows] * 2 * once
        calls.clear()
        for got, alone in zip(products.products(x[:rows], weights), apart, strict=True):
            assert torch.equal(got, alone)
        assert calls == [rows] * once
        calls.clear()
    products.products(x[:least].float(), weights)
    assert not calls


def test_divided_inputs_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, planar = pair(block_type("Q4_K"), 5, 3)
    x = random_rows(17, weight.shape[1])
    for splits in (2, 8):
        monkeypatch.setattr(tiles, "splits_of", lambda *_, splits=splits: splits)
        assert relative_error(tile_product(x, planar), x, weight) < 1e-6


@pytest.mark.parametrize(
    "name, elements, rows, tiled",
    [
        ("F16", 96, 3, False), ("BF16", 96, 3, True), ("BF16", 40, 3, False), ("I8", 64, 3, True),
        ("BF16", 32, 128, True), ("BF16", 32, 129, False), ("F32", 32, 64, True),
        ("F32", 32, 65, False),
    ],
)  # fmt: skip
def test_plain_numbers_are_multiplied_in_the_type_of_the_rows(
    name: str, elements: int, rows: int, tiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By tiles, if it is another one and there are few rows of whole groups."""
    weight, x, calls = random_weight(block_type(name), 7, elements), random_rows(rows, elements), []
    tile = products.tile_product
    monkeypatch.setattr(products, "tile_product", lambda *a: calls.append(1) or tile(*a))
    exact = x.half().double() @ weight.dequantize().half().double().T
    got = product(x.half(), weight)
    assert got.dtype == torch.float16 and len(calls) == tiled
    assert (got.double() - exact).abs().max() < 1e-3 * exact.abs().max()
    assert product(x[:0].half(), weight).shape == (0, 7)


@pytest.mark.parametrize("name", ["F16", "BF16"])
@pytest.mark.parametrize("rows", [1, 130])
def test_plain_numbers_of_a_head_are_multiplied_in_their_own_type(name: str, rows: int) -> None:
    """If that of the rows is float32, in which the products are."""
    weight, x = random_weight(block_type(name), 5, 96), random_rows(rows, 96)
    weight = replace(weight, compute=Compute.FINE)
    got = product(x, weight, torch.float16)
    assert got.dtype == torch.float32 and not torch.equal(got, got.half().float())
    assert 1e-6 < relative_error(got, x, weight) < 2**-10
    assert relative_error(product(x, weight), x, weight) < 1e-6


@pytest.mark.parametrize("name", ["Q4_K", "F16"])
def test_many_rows_are_multiplied_by_dequantised_slabs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "DENSE_ELEMENTS", 4 * 256)
    type = block_type(name)
    weight, planar = pair(type, 9, 256 // type.block_elements, Compute.FINE)
    x = random_rows(65, weight.shape[1])
    assert relative_error(product(x, planar), x, weight) < 1e-6
    assert product(x[:0], planar).shape == (0, 9)


@pytest.mark.parametrize(
    "rows, size",
    [(1, 5), (3, 3), (8, 3), (9, 5), (9, 67), (33, 67), (70, 67), (130, 67), (520, 67)],
)
def test_gated_product_is_the_gate_of_both_products(rows: int, size: int) -> None:
    """To the bit; float16 shows where products are rounded. The interpreter is slow with vectors,
    which compute few rows."""
    _, planar = pair(block_type("Q5_0"), 2 * size, 3, Compute.FINE)
    x, curve = random_rows(rows, planar.shape[1]).half(), curve_of(gelu_mul)
    with placeless_products():
        got = gated_product(x, planar, curve)
        assert torch.equal(got, gate(curve, *product(x, planar).chunk(2, dim=1)))


@pytest.mark.parametrize("name, rows", [("Q4_K", 2), ("Q4_K", 17), ("F16", 2), ("F32", 2)])
def test_gated_product_agrees_with_the_twin(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where programs divide the inputs."""
    weight, planar = pair(block_type(name), 10, 512 // block_type(name).block_elements)
    x = random_rows(rows, weight.shape[1])
    expected = gated_matmul_twin(x, weight, silu_mul_twin)
    monkeypatch.setattr(matmul, "has_kernels", lambda device: True)
    for splits in (1, 2):
        monkeypatch.setattr(tiles, "splits_of", lambda *_, splits=splits: splits)
        got = gated_matmul(x, planar, silu_mul)
        torch.testing.assert_close(
            got, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item()
        )


@pytest.mark.parametrize(
    "name", ["gelu_mul", "gelu_erf_mul", "gelu_quick_mul", "relu_mul", "sigmoid_mul"]
)
def test_gates_are_computed_with_the_product(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, planar = pair(block_type("Q8_0"), 10, 1)
    x = random_rows(9, 32)
    monkeypatch.setattr(matmul, "has_kernels", lambda device: True)
    monkeypatch.setattr(matmul, "matmul", None)
    got = gated_matmul(x, planar, getattr(pointwise, name))
    expected = gated_matmul_twin(x, weight, getattr(pointwise, f"{name}_twin"))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert gated_matmul(x[:0], planar, getattr(pointwise, name)).shape == (0, 5)


def test_other_gates_follow_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, planar = pair(block_type("Q8_0"), 10, 1)
    x = random_rows(2, 32)
    monkeypatch.setattr(matmul, "has_kernels", lambda device: True)
    got = gated_matmul(x, planar, torch.sub)
    torch.testing.assert_close(got, gated_matmul_twin(x, weight, torch.sub), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 9, 70])
def test_operands_are_rounded_and_results_are_not(rows: int) -> None:
    weight, planar = pair(block_type("Q6_K"), 5, 1, Compute.FINE)
    x = random_rows(rows, weight.shape[1])
    got = product(x, planar, torch.bfloat16)
    assert got.dtype == torch.float32 and not torch.equal(got, got.bfloat16().float())
    assert torch.equal(got, product(x, planar)) == (rows <= MOST_ROUNDED_ROWS)
    assert relative_error(got, x, weight) < 2**-9


def test_bundles_have_every_pair_once_and_one_expert_each() -> None:
    chosen = torch.randint(7, (1500,), generator=torch.Generator().manual_seed(0))
    chosen[chosen == 3] = 4
    for pairs, size in ((1500, 16), (5, 32), (64, 64)):
        bundles = bundles_of(chosen[:pairs], 7, size)
        used = bundles.pairs < pairs
        assert torch.equal(bundles.pairs[used].sort().values, torch.arange(pairs).int())
        for expert, members in zip(bundles.experts, bundles.pairs, strict=True):
            real = members[members < pairs]
            assert (members[: len(real)] < pairs).all()
            assert (chosen[real.long()] == expert).all()


@pytest.mark.parametrize("compute", [Compute.EXACT, Compute.FINE], ids=lambda c: c.name)
@pytest.mark.parametrize("shared", [True, False], ids=["a row", "rows"])
@pytest.mark.parametrize("tokens", [0, 2, 20])
def test_products_of_experts_agree_with_the_twin(
    compute: Compute, shared: bool, tokens: int
) -> None:
    """Few pairs are computed by vectors where activations are rounded, others by tiles."""
    used, experts, outs = 2, 4, 3
    weight, _ = pair(block_type("Q4_0"), experts * outs, 3, compute)
    weight = weight.unflatten(experts)
    planar, elements = weight.in_planes(CPU), weight.shape[2]
    x = random_rows(tokens, elements) if shared else random_rows(tokens, used, elements)
    chosen = torch.randint(experts, (tokens, used), generator=torch.Generator().manual_seed(1))
    bias, scale = random_rows(experts, outs), random_rows(tokens, used)
    for options in ({"bias": None, "scale": None}, {"bias": bias, "scale": scale}):
        got = experts_product(x, planar, chosen, **options)
        expected = expert_products_twin(x, weight, chosen, **options)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("elements", [64, 40])
def test_matrices_of_experts_in_plain_numbers_are_not_expanded(
    name: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their type is, unless tiles had to pad all of them."""
    weight = random_weight(block_type(name), 4 * 3, elements).unflatten(4)
    x, chosen = random_rows(5, elements).half(), torch.tensor([[1, 3]]).expand(5, 2)
    bias, scale = random_rows(4, 3), random_rows(5, 2)
    expected = expert_products_twin(x, weight, chosen, bias=bias, scale=scale)
    monkeypatch.setattr(expert_kernels, "has_kernels", lambda device: True)
    if elements == 64:
        monkeypatch.setattr(expert_kernels, "expert_products_twin", None)
    got = expert_kernels.expert_products(x, weight, chosen, bias=bias, scale=scale)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
