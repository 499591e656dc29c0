"""`compute: auto`: of all weights of a file, by its main type and the processor's kernels."""

import gguf
import numpy as np
import pytest
import torch

from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import ScopeOptions, TensorScope
from model_zoo.gguf.tensors import META
from runtime.kernels import native
from runtime.kernels.auto_compute import FAST_TYPES
from runtime.kernels.cpu_levels import LEVELS
from runtime.quant.block_types import block_type
from runtime.quant.weight import Compute
from tests.gguf_files import finish

CPU = torch.device("cpu")
FEW, MANY = (32, 256), (96, 256)


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """A function that places a file with three quarters of its weights in `main` and the others in
    `other`, and returns how both are computed."""

    def place(level: str, main: str, other: str, compute=Compute.AUTO, device=CPU) -> set[Compute]:
        monkeypatch.setattr(native, "kernel_level", lambda: level)
        path = tmp_path / "file.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for name, (rows, columns), type in (("up", MANY, main), ("down", FEW, other)):
            stored = np.zeros((rows, block_type(type).row_bytes(columns)), np.uint8)
            kind = gguf.GGMLQuantizationType[type]
            writer.add_tensor(f"{name}.weight", stored, raw_dtype=kind)
        finish(writer)
        options = ScopeOptions(compute=compute)
        scope = TensorScope(
            GGUFFile.open(path), device=device, dtype=torch.float32, options=options
        )
        placed = scope.linear("up", shape=MANY), scope.linear("down", shape=FEW)
        return {layer.weight.compute for layer in placed}

    return place


@pytest.mark.parametrize("level", ["x86-64-v4-vnni", "x86-64-v4-bf16"])
def test_the_main_type_of_a_file_decides_for_all_its_weights(weights, level: str) -> None:
    assert weights(level, "Q6_K", "Q4_K") == {Compute.FAST}
    assert weights(level, "Q4_K", "Q6_K") == {Compute.AUTO}, "a file in Q4_K_M"
    assert weights("x86-64-v4-amx", "Q6_K", "Q4_K") == {Compute.AUTO}
    assert weights("x86-64-v3", "Q4_K", "Q6_K") == {Compute.FAST}
    assert weights("x86-64-v3", "Q8_0", "Q6_K") == {Compute.AUTO}


@pytest.mark.parametrize("main", ["Q4_K", "Q5_K", "Q6_K"])
def test_kernels_with_avx2_or_without_vnni_are_fast_with_k_types(weights, main: str) -> None:
    for level in ("x86-64-v3", "x86-64-v3-vnni", "x86-64-v4"):
        assert weights(level, main, "Q8_0") == {Compute.FAST}
    assert weights("arm64-dotprod", main, "Q8_0") == {Compute.AUTO}


def test_every_level_whose_processors_multiply_integers_has_an_entry() -> None:
    """That these are the ones with products of integers is tested with their libraries, in
    tests/kernels and tests/arm."""
    multiply = {level.name for level in LEVELS if {"avx2", "asimddp"} & set(level.features)}
    assert multiply == FAST_TYPES.keys()


@pytest.mark.parametrize("compute", [Compute.EXACT, Compute.FINE, Compute.FAST])
def test_a_choice_is_kept(weights, compute: Compute) -> None:
    assert weights("x86-64-v3", "Q4_K", "Q6_K", compute) == {compute}
    assert weights("x86-64-v4-bf16", "Q6_K", "Q6_K", compute) == {compute}


def test_it_is_for_weights_on_cpus_only(weights) -> None:
    assert weights("x86-64-v3", "Q4_K", "Q4_K", device=META) == {Compute.AUTO}
