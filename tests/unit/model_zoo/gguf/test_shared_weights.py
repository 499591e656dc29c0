"""Models of one file share the copies of its weights on a device."""

import gc
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model_zoo.gguf.adapter_path import AdapterPath
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import ScopeOptions, TensorScope
from model_zoo.gguf.shared_weights import SharedWeights
from model_zoo.gguf.tensors import Tensors
from model_zoo.registry import LoadOptions, load
from runtime.distributed.ranks import Split
from runtime.quant.block_types import block_type
from runtime.quant.weight import Weight
from tests.adapter_files import random_pairs, write_adapter
from tests.tiny_models import TinyLlama, write_tiny_llama


def weight() -> Weight:
    return Weight(torch.zeros(2, 8, dtype=torch.uint8), block_type("F32"), (2, 2))


def test_a_copy_is_made_once_while_it_is_used() -> None:
    shared, made = SharedWeights(), []

    def copy() -> Weight:
        made.append("copy")
        return weight()

    one, other = shared.get("a", copy), shared.get("b", copy)
    assert shared.get("a", copy) is one is not other and len(made) == 2
    del one
    gc.collect()
    assert shared.get("b", copy) is other and len(made) == 2
    shared.get("a", copy)
    assert len(made) == 3, "an unused copy was freed"


def test_files_are_recognised_by_their_content_on_disk(tmp_path) -> None:
    path = tmp_path / "a.gguf"
    write_tiny_llama(path)
    os.link(path, tmp_path / "link.gguf")
    shutil.copy(path, tmp_path / "copy.gguf")
    one, link, copy = (
        GGUFFile.open(tmp_path / f"{n}.gguf").identity for n in ("a", "link", "copy")
    )
    assert one == link != copy
    os.utime(path, (0, 0))
    assert GGUFFile.open(path).identity != one


def test_scopes_of_one_file_share_copies(tmp_path, monkeypatch) -> None:
    """`Weight.to` copies here as it does to a GPU."""
    monkeypatch.setattr("model_zoo.gguf.tensors.has_kernels", lambda device: False)
    monkeypatch.setattr(Weight, "to", lambda self, _: replace(self, data=self.data.clone()))
    write_tiny_llama(tmp_path / "tiny.gguf", type="Q8_0")
    shared = SharedWeights()

    def copy(shared: SharedWeights | None, outs: Split | None = None) -> Weight:
        file, device = GGUFFile.open(tmp_path / "tiny.gguf"), torch.device("cuda")
        options = ScopeOptions(shared=shared)
        scope = TensorScope(file, device=device, dtype=torch.float32, options=options)
        return scope.weight("blk.0.attn_output", shape=(64, 64), outs=outs)

    monkeypatch.setattr(Tensors, "_fetch", lambda *_, **__: None)
    halves = Split(((0, 32), (32, 64)), 0), Split(((0, 32), (32, 64)), 1)
    whole, *parts = copy(shared), *(copy(shared, half) for half in halves)
    assert copy(shared) is whole and copy(shared, halves[0]) is parts[0] is not parts[1]
    assert copy(None) is not whole


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_models_with_adapters_take_the_memory_of_one_base_on_a_gpu(tmp_path: Path) -> None:
    path, device = tmp_path / "base.gguf", torch.device("cuda")
    write_tiny_llama(path, config=TinyLlama(hidden=512, feed_forward=2048), type="Q8_0")
    pairs = random_pairs({"blk.0.attn_output.weight": (512, 64)}, 4)
    adapter = write_adapter(tmp_path / "a.gguf", pairs)
    shared, models, taken = SharedWeights(), [], []
    for adapters in ((), (AdapterPath(adapter),), (AdapterPath(adapter, 0.5),)):
        before = torch.cuda.memory_allocated()
        options = LoadOptions(adapters=adapters, shared=shared)
        models.append(load(path, device=device, dtype=torch.bfloat16, options=options))
        taken.append(torch.cuda.memory_allocated() - before)
    base = models[0].description.matrix_bytes
    assert taken[0] >= base and max(taken[1:]) < base / 10
    models.clear()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before - sum(taken[:2]) + 1024
