"""Layers whose weights are in tiles where they are only multiplied, else rows of the file."""

import numpy as np
import pytest
import torch

from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import ScopeOptions, TensorScope
from model_zoo.gguf.tensors import META
from model_zoo.gguf.tiled_copy import TilingOptions
from runtime.distributed.ranks import ALONE, Ranks, Split, Unconnected, evenly
from runtime.quant.weight import Compute, Weight
from tests.gguf_files import write_tensors
from tests.tiles import tiled_type

CPU = torch.device("cpu")
RANDOM = np.random.default_rng(0)
ROWS, TILES = "Q8_0", "Q8_0 in tiles"


def matrix(*shape: int) -> tuple[np.ndarray, str]:
    return RANDOM.standard_normal(shape, dtype=np.float32), ROWS


@pytest.fixture
def scopes(tmp_path, monkeypatch):
    """A function that writes tensors and opens a scope with and one without tiles."""
    monkeypatch.setattr("model_zoo.gguf.tensors.tiled_type", lambda type, compute: tiled_type(type))

    def make(
        *, device=CPU, ranks: Ranks = ALONE, compute=Compute.FINE, progress=None, **tensors
    ) -> tuple[TensorScope, TensorScope]:
        path = tmp_path / "scope.gguf"
        write_tensors(path, {f"{name.replace('__', '.')}.weight": t for name, t in tensors.items()})
        tiling = TilingOptions(tmp_path / "tiles", least_bytes=1, spare_bytes=0)

        def scope(tiling: TilingOptions | None) -> TensorScope:
            options = ScopeOptions(ranks=ranks, compute=compute, progress=progress, tiling=tiling)
            file = GGUFFile.open(path)
            return TensorScope(file, device=device, dtype=torch.float32, options=options)

        return scope(tiling), scope(None)

    return make


def check(tiled: Weight, rows: Weight, type: str = TILES) -> None:
    assert (tiled.type.name, rows.type.name) == (type, ROWS)
    assert tiled.shape == rows.shape and tiled.compute is rows.compute
    assert torch.equal(tiled.dequantize(), rows.dequantize())


def test_products_take_tiles(scopes) -> None:
    tensors = {"up": matrix(32, 64), "some_rows": matrix(24, 64), "down": matrix(3, 16, 64)}
    one, other = scopes(**tensors)
    check(one.linear("up", shape=(32, 64)).weight, other.linear("up", shape=(32, 64)).weight)
    odd = [w.linear("some_rows", shape=(24, 64)).weight for w in (one, other)]
    check(*odd, ROWS)
    shape = (3, 16, 64)
    check(one.experts("down", shape=shape), other.experts("down", shape=shape))
    check(one.weight("down", shape=shape), other.weight("down", shape=shape), ROWS)
    every = [w.merging_linear("up", shape=(32, 64), ins=Split(((0, 64),), 0)) for w in (one, other)]
    check(*(merging.linear.weight for merging in every))
    check(*(w.gathered_linear("up", shape=(32, 64)).linear.weight for w in (one, other)))


def test_adjacent_matrices_are_fused_in_tiles_if_all_have_them(scopes) -> None:
    for rows, type in ((16, TILES), (8, ROWS)):
        shapes = {"q": (32, 64), "k": (rows, 64), "v": (16, 64)}
        one, other = scopes(**{name: matrix(*shape) for name, shape in shapes.items()})
        parts = [w.fused_linear(shapes).parts for w in (one, other)]
        assert len(parts[0]) == 1
        check(*(part[0].weight for part in parts), type)


@pytest.mark.parametrize("apart", [{}, {"norm": (np.ones(8, np.float32), "F32")}])
def test_experts_of_several_tensors_are_stacked_in_tiles(scopes, apart) -> None:
    single = {f"ffn_gate__{n}": matrix(16, 64) for n in range(3)}
    first = {"ffn_gate__0": single.pop("ffn_gate__0")}
    one, other = scopes(**first, **apart, **single)
    check(*(w.experts("ffn_gate_exps", shape=(3, 16, 64)) for w in (one, other)))


def test_a_tied_embedding_has_rows_and_its_head_tiles_which_count_once(scopes) -> None:
    one, other = scopes(token_embd=matrix(32, 64))
    for w in (one, other):
        w.embedding("token_embd", shape=(None, 64))
    embedding = one.embedding("token_embd", shape=(None, 64)).weight
    head = one.linear("output", alt="token_embd", shape=(None, 64)).weight
    assert embedding.type.name == ROWS
    check(head, other.linear("output", alt="token_embd", shape=(None, 64)).weight)
    assert one.linear("output", alt="token_embd", shape=(None, 64)).weight is head
    assert one.loaded_bytes == other.loaded_bytes == 32 * 68


def test_exact_products_and_outlines_need_no_copy(scopes, tmp_path) -> None:
    for changes in ({"compute": Compute.EXACT}, {"device": META}):
        w, _ = scopes(up=matrix(32, 64), **changes)
        assert w.linear("up", shape=(32, 64)).weight.type.name == ROWS
    assert not (tmp_path / "tiles").exists()


def test_processors_without_integer_products_need_no_copy(scopes, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("model_zoo.gguf.tensors.tiled_type", lambda type, compute: None)
    w, _ = scopes(up=matrix(32, 64))
    assert w.linear("up", shape=(32, 64)).weight.type.name == ROWS
    assert not (tmp_path / "tiles").exists()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_cut_tiles_as_they_cut_rows(scopes, size: int) -> None:
    """And take rows where a part does not consist of tiles."""
    rank = size - 1
    ranks = Unconnected(size, rank)
    one, other = scopes(
        ranks=ranks, up=matrix(64, 64 * size), q=matrix(32 * size, 64), k=matrix(32, 64),
        v=matrix(32, 64), experts=matrix(2, 64, 64 * size),
    )  # fmt: skip
    outs, ins = evenly(64, ranks), evenly(64 * size, ranks)
    type = TILES if size == 2 else ROWS
    check(*(w.linear("up", shape=(64, 64 * size), outs=outs).weight for w in (one, other)), type)
    shape = (64, 64 * size)
    check(*(w.merging_linear("up", shape=shape, ins=ins).linear.weight for w in (one, other)))
    shape = (2, 64, 64 * size)
    check(*(w.experts("experts", shape=shape, ins=ins) for w in (one, other)))
    check(*(w.experts("experts", shape=shape, outs=outs) for w in (one, other)), type)
    shapes = {"q": (32 * size, 64), "k": (32, 64), "v": (32, 64)}
    parts = [evenly(rows, ranks) for rows, _ in shapes.values()]
    fused = [w.fused_linear(shapes, outs=parts).parts for w in (one, other)]
    types = (TILES, TILES, TILES) if size == 2 else (TILES, ROWS, ROWS)
    for tiled, rows, expected in zip(*fused, types, strict=True):
        check(tiled.weight, rows.weight, expected)


def test_progress_counts_each_byte_once_however_it_is_read(scopes) -> None:
    heard = []
    w, _ = scopes(
        progress=lambda *now: heard.append(now), token_embd=matrix(32, 64), up=matrix(16, 64),
        norm=(np.ones(8, np.float32), "F32"),
    )  # fmt: skip
    w.embedding("token_embd", shape=(32, 64))
    w.linear("output", alt="token_embd", shape=(32, 64))
    w.linear("up", shape=(16, 64))
    w.rms_norm("norm", 1e-5, size=8)
    total = (32 + 16) * 68 + 32
    done = [now for now, of in heard if of == total]
    assert len(done) == len(heard) and done == sorted(set(done)) and done[-1] == total
