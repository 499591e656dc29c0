"""Adapter files: unsuitable and damaged ones are refused."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from model_zoo.gguf.adapter import Adapter
from model_zoo.gguf.adapter_path import MAX_ADAPTERS, AdapterPath
from model_zoo.gguf.header_only_file import HeaderOnlyFile
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import ScopeOptions, TensorScope
from model_zoo.gguf.tensors import META
from model_zoo.registry import class_for, open_adapters
from runtime.errors import ModelFileError, UnsupportedModelError
from tests.adapter_files import random_pairs, write_adapter, write_tensors
from tests.fuzz.mutations import mutated
from tests.gguf_files import matrices
from tests.tiny_models import write_tiny_llama

MUTATED = 400
QUERY = "blk.0.attn_q.weight"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_llama(path, type="Q8_0")
    return path


def outline(tiny: Path, *adapters: AdapterPath) -> None:
    """Builds the decoder without data, as every start does first."""
    file = HeaderOnlyFile.open(tiny)
    metadata = Metadata(file.metadata, path=tiny)
    opened = open_adapters(adapters, metadata, read=False)
    options = ScopeOptions(adapters=opened)
    scope = TensorScope(file, device=META, dtype=torch.float32, options=options)
    class_for(metadata)(scope, metadata)
    scope.check()


def pair(outs: int = 64, ins: int = 64, rank: int = 4) -> tuple[np.ndarray, np.ndarray]:
    return random_pairs({QUERY: (outs, ins)}, rank)[QUERY]


def one(path: Path, name: str = QUERY, **change) -> Path:
    return write_adapter(path, {name: change.pop("pair", pair())}, **change)


EMBEDDING = np.zeros((7, 4), np.float32), np.zeros((64, 4), np.float32)
REFUSED: list[tuple[Callable[[Path], Path], str]] = [
    (lambda p: one(p, keys={"general.type": "model"}), "`general.type` 'model'"),
    (lambda p: one(p, keys={"general.type": None}), "`general.type` 'model'"),
    (lambda p: one(p, keys={"adapter.type": None}), "`adapter.type` is missing"),
    (lambda p: one(p, keys={"adapter.type": "ia3"}), "'ia3' is not supported"),
    (lambda p: one(p, alpha=float("nan")), "`adapter.lora.alpha` is nan"),
    (lambda p: one(p, keys={"adapter.alora.invocation_tokens": "1"}), "activated adapters"),
    (lambda p: one(p, architecture="qwen2"), "for models of architecture qwen2"),
    (lambda p: one(p, "blk.9.attn_q.weight"), r"that the model lacks.*\(blk.9.attn_q.weight\)"),
    (lambda p: one(p, "blk.0.attn_norm.weight"), "cannot be adapted .*attn_norm"),
    (lambda p: one(p, pair=pair(32)), "attn_q.weight is 64 x 64, not 32 x 64"),
    (lambda p: one(p, pair=pair(ins=32)), "attn_q.weight is 64 x 64, not 64 x 32"),
    (lambda p: one(p, pair=(pair()[0], pair(rank=3)[1])), "of shapes that do not match"),
    (lambda p: one(p, pair=(pair()[0][0], pair()[1][0])), "of shapes that do not match"),
    (lambda p: one(p, "token_embd.weight"), "of shapes that do not match"),
    (lambda p: one(p, "token_embd.weight", pair=EMBEDDING), "token_embd.weight is"),
    (lambda p: write_tensors(p, {}), "has no tensors"),
    (lambda p: write_tensors(p, {f"{QUERY}.lora_a": pair()[0]}), "missing .*lora_b"),
    (lambda p: write_tensors(p, {QUERY: pair()[0]}), "not the matrices of a LoRA"),
]


@pytest.mark.parametrize(("write", "reported"), REFUSED, ids=[r for _, r in REFUSED])
def test_an_unsuitable_adapter_is_refused_with_the_reason(tiny, tmp_path, write, reported) -> None:
    path = write(tmp_path / "adapter.gguf")
    with pytest.raises(ModelFileError, match=reported) as caught:
        outline(tiny, AdapterPath(path))
    assert str(path) in str(caught.value)


def test_the_number_of_adapters_is_limited(tiny, tmp_path) -> None:
    path = one(tmp_path / "adapter.gguf")
    outline(tiny, *[AdapterPath(path)] * MAX_ADAPTERS)
    with pytest.raises(UnsupportedModelError, match=f"the limit is {MAX_ADAPTERS}"):
        outline(tiny, *[AdapterPath(path)] * (MAX_ADAPTERS + 1))


def test_an_adapter_is_no_model(tiny, tmp_path) -> None:
    with pytest.raises(UnsupportedModelError, match="adapter"):
        outline(one(tmp_path / "adapter.gguf"))


@pytest.mark.parametrize(("alpha", "factor"), [(6.0, 0.75), (0.0, 0.5), (None, 0.5)])
def test_the_factor_is_that_of_llama_cpp(tmp_path, alpha, factor) -> None:
    """`llama_adapter_lora_weight::get_scale`: scale * alpha / rank, or scale without an alpha."""
    path = one(tmp_path / "adapter.gguf", alpha=alpha)
    assert Adapter.open(AdapterPath(path, 0.5)).factor(QUERY) == factor


def test_damaged_adapters_are_model_file_errors(tiny, tmp_path) -> None:
    shapes = {
        name: array.shape
        for name, array in matrices(tiny).items()
        if array.ndim == 2 and "blk" in name
    }
    seed = write_adapter(tmp_path / "seed.gguf", random_pairs(shapes, 4), alpha=8.0).read_bytes()
    random, path, refused = Random(7), tmp_path / "damaged.gguf", 0
    for _ in range(MUTATED):
        path.write_bytes(mutated(seed, random))
        try:
            outline(tiny, AdapterPath(path))
        except ModelFileError:
            refused += 1
    assert 0 < refused < MUTATED
