"""Layers whose weights ranks divide: every block type, every layout, and impossible divisions."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import ScopeOptions, TensorScope
from model_zoo.gguf.tensors import META
from model_zoo.layers.experts import ExpertOptions, Experts, ExpertSizes
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.linear import AllGatherLinear, AllReduceLinear
from model_zoo.layers.tensor_parallel import divided_heads, divided_width, local_cache
from model_zoo.rank_part import load_part
from model_zoo.registry import LoadOptions, load
from runtime.distributed.ranks import ALONE, Ranks, Unconnected, evenly
from runtime.errors import ConfigurationError, UnsupportedModelError
from runtime.kernels.experts import expert_products
from runtime.kernels.matmul import matmul, matmul_twin
from runtime.kv.cache_kinds import Full
from runtime.kv.cache_layout import CacheLayout, LayerCache
from runtime.quant.block_types import BLOCK_TYPES, BlockType
from runtime.quant.weight import Weight
from tests.gguf_files import rewrite, write_tensors
from tests.kernels.random_weights import random_weight
from tests.thread_ranks import Meeting
from tests.tiny_models import write_tiny_llama

CPU = torch.device("cpu")
OUTS, BLOCKS = 12, 5
HIDDEN, WIDTH, COUNT = 64, 96, 6


def random(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) * shape[-1] ** -0.5


def rows(count: int, width: int, seed: int = 5) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def write(path: Path, tensors: Mapping[str, np.ndarray], type: str = "F32") -> Path:
    return write_tensors(
        path, {name: (array, type if array.ndim > 1 else "F32") for name, array in tensors.items()}
    )


def scope(path: Path, ranks: Ranks = ALONE, device: torch.device = CPU) -> TensorScope:
    options = ScopeOptions(ranks=ranks)
    return TensorScope(GGUFFile.open(path), device=device, dtype=torch.float32, options=options)


@pytest.mark.parametrize("type", BLOCK_TYPES.values(), ids=lambda type: type.name)
def test_parts_of_blocks_are_parts_of_the_dequantised_matrix(type: BlockType) -> None:
    block = type.block_elements
    weight = random_weight(type, OUTS, BLOCKS * block)
    whole = weight.dequantize()
    assert torch.equal(weight.outputs(2, 9).dequantize(), whole[2:9])
    inner = weight.inputs(block, 4 * block)
    assert torch.equal(inner.dequantize(), whole[:, block : 4 * block])
    assert inner.data.data_ptr() == weight.data.data_ptr() + type.block_bytes  # nothing is copied
    packed = Weight(inner.data.clone(memory_format=torch.contiguous_format), type, inner.shape)
    x = rows(3, 3 * block)
    assert torch.equal(matmul(x, inner), matmul(x, packed))
    assert torch.equal(matmul_twin(x, inner), matmul_twin(x, packed))


@pytest.mark.parametrize("type", BLOCK_TYPES.values(), ids=lambda type: type.name)
def test_parts_of_experts_are_parts_of_their_dequantised_matrices(type: BlockType) -> None:
    block = type.block_elements
    flat = random_weight(type, COUNT * OUTS, BLOCKS * block)
    weight = Weight(flat.data.view(COUNT, OUTS, -1), type, (COUNT, OUTS, BLOCKS * block))
    part = weight.outputs(3, 10).inputs(2 * block, 5 * block)
    assert torch.equal(part.dequantize(), weight.dequantize()[:, 3:10, 2 * block :])
    packed = Weight(part.data.clone(memory_format=torch.contiguous_format), type, part.shape)
    x, chosen = rows(4, 3 * block), torch.tensor([[0, 3], [5, 1], [2, 2], [4, 0]])
    assert torch.equal(expert_products(x, part, chosen), expert_products(x, packed, chosen))


@pytest.mark.parametrize("type", ["F32", "Q8_0"])
def test_a_matrix_after_divided_heads_is_summed_where_blocks_allow_it(tmp_path, type) -> None:
    path = write(tmp_path / "a.gguf", {"down.weight": random(10, 128, seed=1)}, type)
    x, shape = rows(4, 128), (10, 128)
    whole = scope(path).merging_linear("down", shape=shape, ins=evenly(128, ALONE))(x)

    def merged(ranks: Ranks, parts: int) -> tuple[type, Tensor]:
        ins = evenly(parts, ranks).times(128 // parts)
        linear = scope(path, ranks).merging_linear("down", shape=shape, ins=ins)
        return linear, linear(x[:, ins.begin : ins.end])

    for linear, result in Meeting(2).each(lambda ranks: merged(ranks, 4)):
        assert isinstance(linear, AllReduceLinear) and linear.linear.weight.shape == (10, 64)
        torch.testing.assert_close(result, whole)
    for linear, result in Meeting(3).each(lambda ranks: merged(ranks, 8)):  # 48, 48 and 32 inputs
        # Blocks of 32 lie across 48: then each rank has some outputs, to the same bits.
        assert isinstance(linear, AllReduceLinear if type == "F32" else AllGatherLinear)
        assert isinstance(linear, AllReduceLinear) or torch.equal(result, whole)
        torch.testing.assert_close(result, whole)


def test_a_bias_is_added_once(tmp_path) -> None:
    tensors = {"down.weight": random(10, 64, seed=1), "down.bias": random(10, seed=2) + 3}
    path, x = write(tmp_path / "a.gguf", tensors), rows(4, 64)

    def merged(ranks: Ranks) -> Tensor:
        ins = evenly(64, ranks)
        linear = scope(path, ranks).merging_linear("down", shape=(10, 64), ins=ins)
        return linear(x[:, ins.begin : ins.end])

    [whole] = Meeting(1).each(merged)
    for result in Meeting(3).each(merged):
        torch.testing.assert_close(result, whole)


GATED = {
    "ffn_gate.weight": random(WIDTH, HIDDEN, seed=1),
    "ffn_up.weight": random(WIDTH, HIDDEN, seed=2),
    "ffn_down.weight": random(HIDDEN, WIDTH, seed=3),
}


def test_parts_of_neighbours_of_one_type_are_joined_on_other_devices(tmp_path) -> None:
    shapes = {"a": (16, 32), "b": (4, 32), "c": (8, 32)}
    arrays = {name: random(*shape, seed=1) for name, shape in shapes.items()}
    types = {"a": "F32", "b": "F32", "c": "F16"}
    tensors = {f"{name}.weight": (array, types[name]) for name, array in arrays.items()}
    path = write_tensors(tmp_path / "a.gguf", tensors | {"b.bias": (arrays["b"][:, 0], "F32")})
    w = scope(path, Unconnected(2, rank=1), META)
    outs = [evenly(out, w.ranks) for out, _ in shapes.values()]
    fused = w.fused_linear(shapes, outs=outs)
    assert fused.sizes == ((8, 2), (4,))
    assert [part.weight.shape for part in fused.parts] == [(10, 32), (4, 32)]
    assert [part.bias is not None for part in fused.parts] == [True, False]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("type", ["F32", "Q8_0"])
@pytest.mark.parametrize("joined", [False, True])
def test_a_feed_forward_is_divided_inside(tmp_path, size, type, joined) -> None:
    tensors, whole_name = dict(GATED), None
    if joined:
        gate = tensors.pop("ffn_gate.weight")
        tensors["ffn_up.weight"] = np.concatenate([gate, tensors["ffn_up.weight"]])
        whole_name = "ffn_up"
    path, x = write(tmp_path / "a.gguf", tensors, type), rows(7, HIDDEN)

    def computed(ranks: Ranks) -> Tensor:
        w = scope(path, ranks)
        layer = GatedFeedForward(w, hidden=HIDDEN, size=WIDTH, whole=whole_name)
        w.check()
        return layer(x)

    [whole] = Meeting(1).each(computed)
    for result in Meeting(size).each(computed):
        torch.testing.assert_close(result, whole, rtol=1e-5, atol=1e-5)


def stored(way: str) -> dict[str, np.ndarray]:
    gate, up = random(COUNT, WIDTH, HIDDEN, seed=1), random(COUNT, WIDTH, HIDDEN, seed=2)
    down, router = random(COUNT, HIDDEN, WIDTH, seed=3), random(COUNT, HIDDEN, seed=4) * 3
    tensors = {"ffn_gate_inp.weight": router, "ffn_down_exps.weight": down}
    match way:
        case "apart":
            return tensors | {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
        case "halves":
            return tensors | {"ffn_gate_up_exps.weight": np.concatenate([gate, up], axis=1)}
        case "alternating":
            both = np.stack([gate, up], axis=2).reshape(COUNT, 2 * WIDTH, HIDDEN)
            return tensors | {"ffn_gate_up_exps.weight": both}
        case "biased":
            biases = {f"ffn_{n}_exps.bias": random(COUNT, WIDTH, seed=6) for n in ("gate", "up")}
            biases["ffn_down_exps.bias"] = random(COUNT, HIDDEN, seed=7)
            return stored("apart") | biases
    kinds = (("gate", gate), ("up", up), ("down", down))
    singles = {f"ffn_{k}.{e}.weight": a[e] for e in range(COUNT) for k, a in kinds}
    return {"ffn_gate_inp.weight": router, **singles}


@pytest.mark.parametrize("way", ["apart", "halves", "alternating", "biased", "a_tensor_each"])
@pytest.mark.parametrize("size, type", [(2, "F32"), (2, "Q8_0"), (3, "Q8_0"), (4, "Q8_0")])
def test_experts_are_divided_inside(tmp_path, way, size, type) -> None:
    """Three blocks of 32 go into three ranks evenly, but into no two and no four."""
    path, x = write(tmp_path / "a.gguf", stored(way), type), rows(20, HIDDEN)

    def computed(ranks: Ranks) -> Tensor:
        w = scope(path, ranks)
        sizes = ExpertSizes(COUNT, 2, None)
        layer = Experts(w, HIDDEN, sizes, ExpertOptions(alternating=way == "alternating"))
        w.check()
        return layer(x)

    [whole] = Meeting(1).each(computed)
    for result in Meeting(size).each(computed):
        torch.testing.assert_close(result, whole, rtol=1e-4, atol=1e-5)


def test_experts_hold_a_part_of_every_expert(tmp_path) -> None:
    path = write(tmp_path / "a.gguf", stored("apart"), "Q8_0")
    w = scope(path, Unconnected(3))
    Experts(w, HIDDEN, ExpertSizes(COUNT, 2, WIDTH))
    alone = scope(path)
    Experts(alone, HIDDEN, ExpertSizes(COUNT, 2, WIDTH))
    router = COUNT * HIDDEN // 32 * 34
    assert w.loaded_bytes - router == (alone.loaded_bytes - router) // 3


@pytest.mark.parametrize("joined", [False, True])
def test_copied_parts_of_fused_matrices_are_joined(tmp_path, joined) -> None:
    """On a CPU they stay views of the file; the device "meta" stands in for others."""
    tensors = {f"{n}.weight": random(8, 64, seed=i) for i, n in enumerate("abc")}
    tensors |= {f"{n}.bias": random(8, seed=9) for n in "ac"}
    if joined:
        whole = np.concatenate([tensors[f"{n}.weight"] for n in "abc"])
        tensors = {"abc.weight": whole, "abc.bias": random(24, seed=9)}
    path = write(tmp_path / "a.gguf", tensors)
    ranks = Unconnected(2, rank=1)
    outs = (evenly(8, ranks), evenly(4, ranks).times(2), evenly(8, ranks))
    shapes = dict.fromkeys("abc", (8, 64))
    views, copied = (
        scope(path, ranks, device).fused_linear(shapes, whole="abc", outs=outs)
        for device in (CPU, META)
    )
    assert len(views.parts) == 3 and len(copied.parts) == 1
    assert views.sizes == ((4,), (4,), (4,)) and copied.sizes == ((4, 4, 4),)
    assert copied.parts[0].weight.shape == (12, 64) and copied.parts[0].bias is not None
    plain = scope(path).fused_linear(shapes, whole="abc")(rows(3, 64))
    for part, of in zip(views(rows(3, 64)), plain, strict=True):
        assert torch.equal(part, of[:, 4:])


def test_more_ranks_than_heads_are_refused_by_name(tmp_path) -> None:
    path = write(tmp_path / "a.gguf", {"attn_q.weight": random(64, 64, seed=1)}, "Q8_0")
    w = scope(path, Unconnected(5))
    wanted = r"attn_q\.weight \(Q8_0\) has 4 heads, .* among 5 ranks; `parallel.tensor` .* 1 to 4"
    with pytest.raises(ConfigurationError, match=wanted):
        divided_heads(w, 4, 2)
    with pytest.raises(ConfigurationError, match=r"ffn_down\.weight has 3 inputs"):
        divided_width(w, 3, "ffn_down")


def test_groups_of_layers_are_the_same_on_every_rank() -> None:
    """Although some ranks have as many key heads of both."""
    caches = [LayerCache(Full(), heads, 16, 16) for heads in (2, 3, 2)]
    layouts = [
        CacheLayout.of([local_cache(c, Unconnected(2, rank)) for c in caches], page_tokens=8)
        for rank in range(2)
    ]
    assert [[g.layers for g in layout.groups] for layout in layouts] == [[(0, 2), (1,)]] * 2
    assert [g.cache.kv_heads for g in layouts[0].groups] == [1, 2]
    assert [g.cache.kv_heads for g in layouts[1].groups] == [1, 1]


def test_an_architecture_that_cannot_be_divided_is_refused_by_name(tmp_path) -> None:
    write_tiny_llama(tmp_path / "a.gguf")
    path = rewrite(
        tmp_path / "a.gguf", tmp_path / "b.gguf", keys={"general.architecture": "gemma3n"}
    )
    assert Metadata(GGUFFile.open(path).metadata, path=path).architecture == "gemma3n"
    where, ranks = {"device": META, "dtype": torch.float32}, Unconnected(2)
    refusal = r"gemma3n cannot be .* 2 ranks.*llama"
    with pytest.raises(UnsupportedModelError, match=refusal):
        load(path, **where, options=LoadOptions(ranks=ranks))
    with pytest.raises(UnsupportedModelError, match=refusal):
        load_part(path, **where, options=LoadOptions(ranks=ranks))


def test_a_model_can_be_checked_before_its_ranks_are_there(tmp_path) -> None:
    write_tiny_llama(tmp_path / "a.gguf")
    where = {"device": META, "dtype": torch.float32}
    four, five = (LoadOptions(ranks=Unconnected(size)) for size in (4, 5))
    assert load(tmp_path / "a.gguf", **where, options=four).decoder.vocab_size > 0
    with pytest.raises(ConfigurationError, match=r"blk\.0\.attn_q"):
        load(tmp_path / "a.gguf", **where, options=five)


def test_only_the_bytes_of_this_rank_are_read(tmp_path) -> None:
    path = write(tmp_path / "a.gguf", GATED)
    file, read = GGUFFile.open(path), []
    fetch = file.fetch

    def noted(name, *part, **options):
        read.append((name, *part))
        return fetch(name, *part, **options)

    file.fetch = noted
    heard: list[tuple[int, int]] = []
    w = TensorScope(
        file,
        device=CPU,
        dtype=torch.float32,
        options=ScopeOptions(
            ranks=Unconnected(2, rank=1), progress=lambda *told: heard.append(told)
        ),
    )
    GatedFeedForward(w, hidden=HIDDEN, size=WIDTH)
    row = 4 * HIDDEN
    assert read[0] == ("ffn_gate.weight", 48 * row, 48 * row)
    assert heard == sorted(heard) and heard[-1][0] == heard[-1][1]
