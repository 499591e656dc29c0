"""Products with chosen experts: the fast path against plain torch, its twin and itself."""

import ctypes
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.kernels import experts as room
from runtime.kernels.experts import (
    clamped_swiglu,
    clamped_swiglu_twin,
    expert_products,
    expert_products_twin,
    limited_swiglu,
    limited_swiglu_twin,
    weighted_sum,
    weighted_sum_twin,
)
from runtime.kernels.matmul import matmul
from runtime.kernels.native import library
from runtime.kernels.pointwise import Gate
from runtime.quant.block_types import BLOCK_TYPES, MXFP4_PAIRS, BlockType, block_type
from runtime.quant.weight import Weight
from tests.kernels.native_kernels import require_native_kernels
from tests.kernels.random_weights import random_rows, random_weight

TYPES = (*BLOCK_TYPES.values(), MXFP4_PAIRS)
every_type = pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
both = pytest.mark.parametrize("products", [expert_products, expert_products_twin])
# Experts, and for several numbers of rows how many each chooses: one expert, few rows each, all.
EXPERTS = 7
BATCHES = ((1, 1), (1, 7), (3, 2), (9, 7), (40, 2), (150, 3))


def random_experts(
    type: BlockType, outs: int, elements: int, *, experts: int = EXPERTS, seed: int = 0
) -> Weight:
    flat = random_weight(type, experts * outs, elements, seed=seed)
    return Weight(flat.data.view(experts, outs, -1), type, (experts, outs, elements))


def random_choices(tokens: int, used: int, *, experts: int = EXPERTS, seed: int = 0) -> Tensor:
    drawn = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
    return drawn.argsort(dim=1)[:, :used].contiguous()


def odd_length(type: BlockType) -> int:
    return 529 if type.block_elements == 1 else 3 * type.block_elements


def relative_error(got: Tensor, x: Tensor, weight: Weight, chosen: Tensor) -> float:
    """The largest error, relative to the norms of the vectors; x [tokens, used, in]."""
    dense, x = weight.dequantize().double(), x.double()
    expected = torch.empty(got.shape, dtype=torch.float64)
    for expert, matrix in enumerate(dense):
        expected[chosen == expert] = x[chosen == expert] @ matrix.T
    size = x.norm(dim=2, keepdim=True) * dense.norm(dim=2)[chosen]
    return ((got.double() - expected).abs() / size).max().item()


@both
@every_type
def test_products_are_those_of_the_experts_as_dense_matrices(
    type: BlockType, products: Callable[..., Tensor]
) -> None:
    elements = odd_length(type)
    weight = random_experts(type, 65, elements)
    for tokens, used in BATCHES:
        chosen, x = random_choices(tokens, used), random_rows(tokens, elements)
        got = products(x, weight, chosen)
        assert got.dtype == torch.float32 and got.shape == (tokens, used, 65)
        repeated = x.unsqueeze(1).expand(-1, used, -1)
        assert relative_error(got, repeated, weight, chosen) < 1e-6
        own = random_rows(tokens, used, elements, seed=1)
        assert relative_error(products(own, weight, chosen), own, weight, chosen) < 1e-6


@pytest.mark.parametrize("name", ["F32", "Q4_K", "Q5_0", "IQ2_XS", "I16"])
@pytest.mark.parametrize("outs", [1, 23, 60, 61, 130])
def test_a_product_equals_that_with_the_expert_matrix_alone_to_the_bit(name, outs) -> None:
    require_native_kernels()
    weight = random_experts(block_type(name), outs, 256)
    chosen, x = random_choices(90, 2), random_rows(90, 256)
    got = expert_products(x, weight, chosen)
    for expert in range(EXPERTS):
        rows, choice = (chosen == expert).nonzero(as_tuple=True)
        matrix = replace(weight, data=weight.data[expert], shape=weight.shape[1:])
        assert torch.equal(got[rows, choice], matmul(x[rows], matrix))


@every_type
def test_a_row_has_the_same_bits_alone_and_in_any_batch(type: BlockType) -> None:
    require_native_kernels()
    elements = odd_length(type)
    weight = random_experts(type, 50, elements, experts=3)
    chosen, x = random_choices(140, 2, experts=3), random_rows(140, elements)
    bias, scale = random_rows(3, 50, seed=2), random_rows(140, 2, seed=3)
    alone = torch.cat(
        [
            expert_products(
                x[r : r + 1], weight, chosen[r : r + 1], bias=bias, scale=scale[r : r + 1]
            )
            for r in range(140)
        ]
    )
    for rows in (2, 5, 12, 13, 37, 38, 140):
        some = slice(140 - rows, 140)
        got = expert_products(x[some], weight, chosen[some], bias=bias, scale=scale[some])
        assert torch.equal(got, alone[some]), rows


@both
@every_type
def test_unused_experts_do_not_change_the_result(
    type: BlockType, products: Callable[..., Tensor]
) -> None:
    elements = 256
    weight = random_experts(type, 30, elements)
    for tokens in (2, 70):
        chosen = torch.tensor([[5, 2], [2, 0]]).repeat(tokens // 2, 1)
        x = random_rows(tokens, elements)
        expected = products(x, weight, chosen)
        spoilt = weight.data.clone()
        spoilt[[1, 3, 4, 6]] = 0xFF  # NaN, where a type has any
        assert torch.equal(products(x, replace(weight, data=spoilt), chosen), expected)
        assert expected.isfinite().all()


def test_no_byte_of_an_unused_expert_is_read() -> None:
    """The pages are protected: reading them would end the process."""
    require_native_kernels()
    code = """
import ctypes, mmap
import torch
from runtime.kernels.experts import expert_products
from runtime.quant.block_types import block_type
from runtime.quant.weight import Weight

outs, type = mmap.PAGESIZE // 144, block_type("Q4_K")
memory = mmap.mmap(-1, 8 * mmap.PAGESIZE)
data = torch.frombuffer(memory, dtype=torch.uint8).view(8, -1)[:, : outs * 144]
weight = Weight(data.view(8, outs, 144), type, (8, outs, 256))
protect = ctypes.CDLL(None, use_errno=True).mprotect
protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
for readable in ({2, 7}, {2}):
    for expert in set(range(8)) - readable:
        assert protect(data.data_ptr() + expert * mmap.PAGESIZE, mmap.PAGESIZE, 0) == 0
    for tokens in (1, 100):
        chosen = torch.tensor([[2, 7]]).repeat(tokens, 1)
        products = expert_products(torch.randn(tokens, 256), weight, chosen)
        print(products.abs().max().item(), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "0.0\n0.0\n", done.stderr
    # Then an expert in use cannot be read, or nothing was protected.
    assert done.returncode < 0


@pytest.mark.parametrize("tokens", [1, 64, 500])
@pytest.mark.parametrize("used", [1, 3, 7])
def test_each_expert_in_use_is_read_once_however_many_rows_choose_it(
    tokens: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_native_kernels()
    read: list[int] = []

    def noted(job: Any, threads: int) -> int:
        done = kernels.caravan_experts(job, threads)
        pairs, most = tokens * used, min(tokens * used, 40)
        places = (ctypes.c_int32 * kernels.caravan_experts_places(pairs, 40)).from_address(
            job._obj.places
        )
        starts, experts = (places[40 + 2 * pairs + n :] for n in (0, most + 1))
        read.extend(experts[: starts.index(pairs)])
        return done

    kernels = library()
    names = ("caravan_matmul_knows", "caravan_packed_bytes", "caravan_experts_places")
    recorded = {name: getattr(kernels, name) for name in names}
    monkeypatch.setattr(room, "library", lambda: SimpleNamespace(caravan_experts=noted, **recorded))
    chosen = random_choices(tokens, used, experts=40)
    expert_products(
        random_rows(tokens, 64), random_experts(block_type("Q8_0"), 9, 64, experts=40), chosen
    )
    assert read == chosen.unique().tolist()


@pytest.mark.parametrize("tokens, used", [(1, 1), (1, 8), (3, 8), (64, 2), (500, 8)])
def test_the_twin_expands_few_unused_matrices(
    tokens: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expanded = []

    def counted(data: Tensor, type: BlockType) -> Tensor:
        expanded.append(data.shape[0] * data.shape[1])
        return type_dequantize(data, type)

    type_dequantize = room.dequantize
    monkeypatch.setattr(room, "dequantize", counted)
    weight, chosen = (
        random_experts(block_type("Q8_0"), 9, 64, experts=40),
        random_choices(tokens, used),
    )
    expert_products_twin(random_rows(tokens, 64), weight, chosen)
    pairs, in_use = tokens * used, chosen.unique().numel()
    bundle = room._bundle_size(pairs, 40)
    assert sum(expanded) <= 9 * min(pairs, pairs // bundle + in_use)
    assert pairs // bundle <= max(pairs if pairs < 80 else 0, 4 * 40)


@both
def test_a_bias_is_added_and_a_scale_multiplies_the_rows_beforehand(products) -> None:
    weight = random_experts(block_type("Q8_0"), 20, 64)
    for tokens, used in BATCHES:
        chosen, x = random_choices(tokens, used), random_rows(tokens, 64)
        bias, scale = random_rows(EXPERTS, 20, seed=2), random_rows(tokens, used, seed=3)
        got = products(x, weight, chosen, bias=bias, scale=scale)
        expected = products(x.unsqueeze(1) * scale.unsqueeze(2), weight, chosen) + bias[chosen]
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@both
@pytest.mark.parametrize("rows", [slice(0, 20), slice(20, 40), slice(0, 40, 2), slice(1, 40, 2)])
def test_gates_and_ups_may_be_views_of_one_tensor(products, rows: slice) -> None:
    """Halves, or every other row; the experts' matrices are then not adjacent."""
    whole = random_experts(block_type("MXFP4"), 40, 64)
    part = Weight(whole.data[:, rows], whole.type, (EXPERTS, 20, 64))
    chosen, x = random_choices(30, 2), random_rows(30, 64)
    expected = products(x, whole, chosen)[..., rows]
    torch.testing.assert_close(products(x, part, chosen), expected, rtol=1e-5, atol=1e-5)


@both
def test_no_rows_give_no_rows(products) -> None:
    weight = random_experts(block_type("Q8_0"), 5, 64)
    for used in (1, 7):
        nobody = torch.empty(0, used, dtype=torch.int64)
        assert products(torch.empty(0, 64), weight, nobody).shape == (0, used, 5)
    assert products(torch.empty(0, 64), weight, nobody, bias=torch.zeros(7, 5)).shape == (0, 7, 5)


def test_integer_experts_accept_zero_rows() -> None:
    weight, nobody = random_experts(block_type("I8"), 5, 64), torch.empty(0, 2, dtype=torch.int64)
    assert expert_products(torch.empty(0, 64), weight, nobody).shape == (0, 2, 5)


@both
def test_a_single_expert_is_a_plain_product(products) -> None:
    weight = random_experts(block_type("Q6_K"), 30, 256, experts=1)
    x, chosen = random_rows(50, 256), torch.zeros(50, 1, dtype=torch.int64)
    expected = matmul(x, replace(weight, data=weight.data[0], shape=(30, 256)))
    rounding = 1e-6 * expected.abs().max().item()  # of large terms that cancel each other
    torch.testing.assert_close(
        products(x, weight, chosen)[:, 0], expected, rtol=1e-5, atol=rounding
    )


@both
@pytest.mark.parametrize("name", ["Q8_0", "I8"])
def test_a_row_may_have_all_experts_in_order(products, name: str) -> None:
    weight = random_experts(block_type(name), 9, 64)
    everyone = torch.arange(EXPERTS).repeat(4, 1)
    for x in (random_rows(4, 64), random_rows(4, EXPERTS, 64)):
        assert torch.equal(products(x, weight, None), products(x, weight, everyone))


@both
def test_a_row_may_choose_an_expert_twice(products) -> None:
    weight, x = random_experts(block_type("Q8_0"), 9, 64), random_rows(4, 64)
    got = products(x, weight, torch.tensor([[3, 3]]).repeat(4, 1))
    torch.testing.assert_close(got[:, 0], got[:, 1])


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    require_native_kernels()
    weight = random_experts(block_type("Q4_K"), 300, 512)
    x, chosen, before = random_rows(60, 512), random_choices(60, 3), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(expert_products(x, weight, chosen))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_activations_are_multiplied_in_float32(dtype: torch.dtype) -> None:
    require_native_kernels()
    weight, chosen = random_experts(block_type("Q8_0"), 40, 256), random_choices(6, 2)
    x = random_rows(6, 256).to(dtype)
    got = expert_products(x, weight, chosen)
    assert got.dtype == dtype
    assert torch.equal(got, expert_products(x.float(), weight, chosen).to(dtype))


def test_a_choice_out_of_range_is_refused_before_any_read() -> None:
    require_native_kernels()
    weight, x = random_experts(block_type("Q8_0"), 5, 64), random_rows(2, 64)
    for wrong in (-1, EXPERTS):
        with pytest.raises(ValueError, match="7"):
            expert_products(x, weight, torch.tensor([[0], [wrong]]))


def test_the_twin_gives_the_same_slab_by_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, chosen = (
        random_experts(block_type("Q4_K"), 50, 512),
        random_rows(30, 512),
        random_choices(30, 3),
    )
    whole = expert_products_twin(x, weight, chosen)
    for slab in (7 * 512, 3 * 50 * 512, 1):
        monkeypatch.setattr(room, "SLAB_ELEMENTS", slab)
        got = expert_products_twin(x, weight, chosen)
        torch.testing.assert_close(got, whole, rtol=1e-5, atol=1e-4)


def test_the_twins_are_used_without_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, chosen = (
        random_experts(block_type("Q6_K"), 9, 256),
        random_rows(3, 256),
        random_choices(3, 2),
    )
    monkeypatch.setattr(room, "library", lambda: None)
    products = expert_products(x, weight, chosen)
    assert torch.equal(products, expert_products_twin(x, weight, chosen))
    assert torch.equal(weighted_sum(products, x[:, :2]), weighted_sum_twin(products, x[:, :2]))


@pytest.mark.parametrize("tokens, used, n", [(1, 1, 1), (3, 2, 17), (70, 8, 300), (0, 4, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weighted_sums_are_those_of_torch_and_do_not_depend_on_the_batch(tokens, used, n, dtype):
    x, weights = random_rows(tokens, used, n).to(dtype), random_rows(tokens, used, seed=1)
    got = weighted_sum(x, weights)
    expected = torch.einsum("tun,tu->tn", x.double(), weights.double()).to(dtype)
    assert got.dtype == dtype
    torch.testing.assert_close(
        got, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )
    torch.testing.assert_close(weighted_sum_twin(x, weights), got)
    rows = [weighted_sum(x[r : r + 1], weights[r : r + 1]) for r in range(tokens)]
    assert not tokens or torch.equal(torch.cat(rows), got)


@pytest.mark.parametrize("weighted", [True, False])
def test_sums_may_also_be_scaled_by_expert(weighted: bool) -> None:
    x, scales = random_rows(9, 3, 70), random_rows(EXPERTS, seed=2)
    chosen = random_choices(9, 3)
    weights = random_rows(9, 3, seed=1) if weighted else None
    factors = scales[chosen] if weights is None else weights * scales[chosen]
    for summed in (weighted_sum, weighted_sum_twin):
        got = summed(x, weights, chosen=chosen, scales=scales)
        torch.testing.assert_close(got, torch.einsum("tun,tu->tn", x, factors))
        torch.testing.assert_close(summed(x, None), x.sum(dim=1))


def test_sums_refuse_experts_without_a_scale() -> None:
    require_native_kernels()
    for wrong in (-1, EXPERTS):
        with pytest.raises(ValueError, match="7"):
            weighted_sum(
                random_rows(1, 1, 4), None, chosen=torch.tensor([[wrong]]), scales=torch.ones(7)
            )


CLAMPED = {"limit": 7.0, "slope": 1.702}
CLAMPED_GATES = [
    (partial(clamped_swiglu, **CLAMPED), partial(clamped_swiglu_twin, **CLAMPED)),
    (partial(limited_swiglu, limit=7.0), partial(limited_swiglu_twin, limit=7.0)),
]


@pytest.mark.parametrize("gated, twin", CLAMPED_GATES, ids=["before the curve", "after it"])
@pytest.mark.parametrize("shape", [(1,), (3, 17), (40, 333)])
def test_a_clamped_gate_is_its_twin(shape: tuple[int, ...], gated: Gate, twin: Gate) -> None:
    gate, up = random_rows(*shape) * 6, random_rows(*shape, seed=1) * 6
    if gate.numel() > 6:
        extremes = torch.tensor([torch.inf, 88.0, 1e30, -1e30, 0.0, torch.nan])
        gate.view(-1)[:6], up.view(-1)[-6:] = extremes, extremes
    torch.testing.assert_close(
        gated(gate, up), twin(gate, up), rtol=1e-5, atol=1e-6, equal_nan=True
    )
