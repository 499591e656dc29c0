"""Deterministic computing: a row has the same bits alone, among others, and in other chunks."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model_zoo.gguf.adapter_path import AdapterPath
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import ScopeOptions, TensorScope
from model_zoo.registry import class_for, open_adapters
from runtime.kernels.attention import Scoring, paged_attention_twin
from runtime.kernels.experts import expert_products_twin
from runtime.kernels.triton import attention as kernels
from runtime.kernels.triton import tiles
from runtime.kernels.triton.attention import paged_attention
from runtime.kernels.triton.log_sums import log_sums
from runtime.kernels.triton.products import experts_product, product
from runtime.kv.cache_types import CacheType
from runtime.quant.block_types import block_type
from runtime.quant.weight import PLANAR_TYPES, Compute, Weight
from runtime.worker.model import AttentionPlan, DecoderModel
from tests.adapter_files import random_pairs, write_adapter
from tests.cuda.interpreted import CPU, as_on_a_device, placeless_products
from tests.families.paged_decoder import PagedDecoder
from tests.kernels import test_attention as scenes
from tests.kernels.random_weights import random_rows, random_weight, relative_error
from tests.kernels.test_attention import SCALE, rows_of, scene
from tests.tiny_models import TinyLlama, write_tiny_llama


@pytest.fixture(autouse=True)
def as_tensor_cores() -> Iterator[None]:
    with placeless_products():
        yield


# (slot, start, rows), with rows of one split and of two.
SHORT = ((0, 5, 3), (2, 200, 1), (1, 126, 4), (3, 0, 1))


def weight_of(name: str, outs: int, elements: int) -> Weight:
    """In the form that the kernels read."""
    plain = random_weight(block_type(name), outs, elements)
    return replace(plain, compute=Compute.FINE, deterministic=True).in_planes(CPU)


@pytest.mark.parametrize(
    "name, elements",
    [("Q4_K", 1024), ("Q6_K", 512), ("Q8_0", 288), ("MXFP4", 96), ("F16", 1024), ("F32", 96)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_of_a_product_has_the_same_bits_among_any_others(
    name: str, elements: int, dtype: torch.dtype
) -> None:
    """In the first tile and in the last, with divided inputs where there are many."""
    weight, x = weight_of(name, 3, elements), random_rows(66, elements)
    together = product(x, weight, dtype)
    assert together.dtype == torch.float32
    for begin, end in ((0, 1), (5, 8), (63, 66), (20, 37)):
        assert torch.equal(product(x[begin:end], weight, dtype), together[begin:end]), (begin, end)
    assert relative_error(together, x, weight) < (1e-6 if dtype == torch.float32 else 2**-10)


def test_any_number_of_rows_has_the_same_tiles_and_divided_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a matrix of a model, which no test computes."""
    type, launched = PLANAR_TYPES["Q4_K"], set()

    def launch(kernel, grid, *arguments, **options) -> None:
        constants = {name: value for name, value in options.items() if name != "device"}
        launched.add((kernel.__name__, *constants.items()))

    monkeypatch.setattr(tiles, "launch", launch)
    data = torch.empty(1024, type.row_bytes(4096), dtype=torch.uint8)
    weight = Weight(data, type, (1024, 4096), deterministic=True)
    for rows in (1, 8, 65, 300, 2048):
        product(torch.empty(rows, 4096, dtype=torch.float16), weight)
    assert {name for name, *_ in launched} == {"tile_kernel", "sum_kernel"}
    assert len(launched) == 2, launched


def test_other_products_depend_on_the_number_of_rows() -> None:
    """So that the test above shows something."""
    weight, x = replace(weight_of("Q4_K", 3, 1024), deterministic=False), random_rows(20, 1024)
    assert not torch.equal(product(x[:1], weight), product(x, weight)[:1])


@pytest.mark.parametrize("elements", [4, 40, 96])
@pytest.mark.parametrize("name", ["F32", "F16", "I8", "F64"])
def test_plain_weights_may_have_any_number_of_inputs(name: str, elements: int) -> None:
    weight, x = weight_of(name, 5, elements), random_rows(3, elements)
    got = product(x, weight)
    assert relative_error(got, x, weight) < 1e-6
    assert torch.equal(product(x[1:2], weight), got[1:2])


@pytest.mark.parametrize("name", ["Q4_0", "F16"])
@pytest.mark.parametrize("shared", [True, False], ids=["a row", "rows"])
def test_a_row_of_experts_has_the_same_bits_among_any_others(name: str, shared: bool) -> None:
    experts, used, outs, tokens = 4, 2, 3, 40  # more pairs of an expert than a tile has rows
    weight = weight_of(name, experts * outs, 96).unflatten(experts)
    x = random_rows(tokens, 96) if shared else random_rows(tokens, used, 96)
    chosen = torch.randint(2, (tokens, used), generator=torch.Generator().manual_seed(1)) * 3
    bias, scale = random_rows(experts, outs), random_rows(tokens, used)
    together = experts_product(x, weight, chosen, bias, scale)
    expected = expert_products_twin(x, weight, chosen, bias=bias, scale=scale)
    torch.testing.assert_close(together, expected, rtol=1e-4, atol=1e-4)
    for some in (slice(0, 1), slice(37, 40)):
        alone = experts_product(x[some], weight, chosen[some], bias, scale[some])
        assert torch.equal(alone, together[some])


@pytest.mark.parametrize(
    "type, programs", [(CacheType.FLOAT16, 1), (CacheType.FLOAT16, 9), (CacheType.Q8_0, 1)], ids=str
)
def test_a_row_attends_with_the_same_bits_in_a_prompt_and_alone(
    type: CacheType, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a device needed few programs, or, for few rows, more than they have splits."""
    monkeypatch.setattr(kernels, "LEAST_PARTS", 1)
    monkeypatch.setattr(kernels, "PROGRAMS_EACH", programs)
    monkeypatch.setattr(kernels, "LEAST_PROGRAMS_EACH", programs)
    monkeypatch.setitem(scenes.BATCHES, "short", SHORT)
    queries, pages, plan = scene("short", "four share", type=type)
    together = attended(queries, pages, plan)
    expected = paged_attention_twin(queries, pages, plan, Scoring(SCALE))
    torch.testing.assert_close(together, expected, rtol=1e-5, atol=1e-5)
    for span in plan.spans:
        length = span.end - span.begin
        for begin, end in ((0, 1), (length // 2, length // 2 + 5), (length - 1, length)):
            begin, end = span.begin + begin, min(span.begin + end, span.end)
            one = rows_of(plan, begin, end)
            assert torch.equal(attended(queries[begin:end], pages, one), together[begin:end])


def attended(queries: Tensor, pages, plan: AttentionPlan) -> Tensor:
    return paged_attention(queries, pages, plan, Scoring(SCALE), deterministic=True)


def test_logarithms_of_sums_are_those_of_torch_and_have_their_bits_in_any_batch() -> None:
    logits = random_rows(17, 5000) * 9
    logits[1, :4000], logits[2, 7], logits[3, 8] = -torch.inf, torch.inf, torch.nan
    logits[4] = -torch.inf
    got = log_sums(logits)
    expected = logits.double().logsumexp(dim=1, keepdim=True).float()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert torch.equal(log_sums(logits[5:6]), got[5:6])
    assert torch.equal(log_sums(logits[:, :4999])[6:9], log_sums(logits[6:9, :4999]))


@pytest.mark.parametrize("type", ["F16", "Q8_0"])
def test_logits_of_a_model_have_the_same_bits_in_any_batch(
    type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an adapter; a prompt at once and a token, alone; in chunks, beside two others."""
    path, sizes = tmp_path / "tiny.gguf", TinyLlama(layers=1)
    write_tiny_llama(path, config=sizes, type=type)
    outs = {"attn_q": sizes.heads * sizes.head_dim, "ffn_up": sizes.feed_forward}
    shapes = {f"blk.0.{name}.weight": (out, sizes.hidden) for name, out in outs.items()}
    adapter = write_adapter(tmp_path / "adapter.gguf", random_pairs(shapes, 4))
    prompt, others = [5, 9, 4, 7, 8, 3, 6, 2, 11, 5, 12], [[7, 3, 9, 4, 2], [8] * 12]
    with as_on_a_device():
        monkeypatch.setattr(F, "linear", None)  # nothing of a library whose order is unknown
        model = deterministic_model(path, AdapterPath(adapter))
        alone = PagedDecoder(model, slots=3)
        expected = torch.cat([alone.feed({0: prompt}), alone.feed({0: [13]})])
        beside = PagedDecoder(model, slots=3)
        first = beside.feed({1: others[0][:2], 0: prompt[:4], 2: others[1][:7]})[2:6]
        second = beside.feed({0: prompt[4:], 2: others[1][7:9]})[: len(prompt) - 4]
        third = beside.feed({1: others[0][2:3], 2: others[1][9:10], 0: [13]})[2:]
        assert torch.equal(torch.cat([first, second, third]), expected)


def deterministic_model(path: Path, *adapters: AdapterPath) -> DecoderModel:
    file = GGUFFile.open(path)
    metadata = Metadata(file.metadata, path=path)
    opened = open_adapters(adapters, metadata)
    options = ScopeOptions(compute=Compute.FINE, deterministic=True, adapters=opened)
    scope = TensorScope(file, device=CPU, dtype=torch.float32, options=options)
    return class_for(metadata)(scope, metadata)
