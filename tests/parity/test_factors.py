"""Factors of products, as files of llama.cpp in NVFP4 have them: the logits are those of matrices
that are multiplied by them, to the bit where the factors are powers of two."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from model_zoo.gguf.adapter_path import AdapterPath
from runtime.errors import ModelFileError
from tests.adapter_files import random_pairs, write_adapter
from tests.families.agreement import check_declared_memory, load_decoder, random_tokens
from tests.families.factored_files import factored
from tests.families.paged_decoder import PagedDecoder
from tests.families.text_families import TEXT_MODELS
from tests.families.text_family import changed
from tests.gguf_files import Reader, matrices
from tests.parity.test_adapters import decoder_with
from tests.parity.test_divided_models import fed
from tests.thread_ranks import Meeting

# Matrices that are joined or not, biases, a tied head, fused rows, experts of every form, latent
# attention, recurrent layers.
FAMILIES = {
    "llama": "plain",
    "qwen2": "plain",
    "gemma3": "plain",
    "phi3": "plain",
    "qwen3moe": "plain",
    "gpt-oss": "plain",
    "gemma4": "experts",
    "llama4": "plain",
    "deepseek2": "v3",
    "qwen35moe": "plain",
    "granitehybrid": "plain",
}
DIVIDED = ("qwen2", "phi3", "qwen3moe", "gpt-oss")
TOKENS = random_tokens(41, seed=1)


def files(family: str, folder: Path, powers: Sequence[int] = range(-6, 4)) -> tuple[Path, Path]:
    """A family's tiny model, and the same with factors."""
    path = folder / "tiny.gguf"
    TEXT_MODELS[family].write(path, FAMILIES.get(family, "plain"))
    return path, factored(path, folder / "factored.gguf", powers)


def logits(path: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    paged = PagedDecoder(load_decoder(path, dtype))
    return torch.cat([paged.feed({0: TOKENS[:38]}), paged.feed({0: TOKENS[38:]})])


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_have_the_bits_of_undivided_matrices(tmp_path, family: str) -> None:
    path, other = files(family, tmp_path)
    assert any(tensor.name.endswith(".input_scale") for tensor in Reader(other).tensors)
    expected = logits(path)
    assert torch.equal(logits(other), expected) and expected.isfinite().any()


@pytest.mark.parametrize("family", ["qwen2", "gpt-oss"])
def test_memory_of_a_step_is_declared(tmp_path, family: str) -> None:
    decoder = load_decoder(files(family, tmp_path)[1])
    for tokens, outputs in ((1, 1), (120, 3), (120, 120)):
        check_declared_memory(decoder, tokens, outputs)


@pytest.mark.parametrize("family", DIVIDED)
def test_ranks_have_the_bits_of_undivided_matrices(tmp_path, family: str) -> None:
    path, other = files(family, tmp_path)
    expected = Meeting(2).each(partial(fed, path))
    for one, two in zip(Meeting(2).each(partial(fed, other)), expected, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("family", ["llama", "qwen3moe"])
def test_products_may_exceed_float16_before_they_are_multiplied(tmp_path, family: str) -> None:
    path, other = files(family, tmp_path, powers=(-20,))
    expected = logits(path, torch.float16)
    assert torch.equal(logits(other, torch.float16), expected) and expected.isfinite().any()


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("qwen2", ["blk.0.attn_q", "blk.1.ffn_up", "blk.1.ffn_down", "output"]),
        ("qwen3moe", ["blk.0.ffn_up_exps", "blk.0.ffn_down_exps"]),
    ],
)
def test_adapters_add_to_the_multiplied_product(tmp_path, family: str, names: list[str]) -> None:
    path, other = files(family, tmp_path)
    numbers = matrices(path)
    pairs = random_pairs({f"{name}.weight": numbers[f"{name}.weight"].shape for name in names}, 4)
    adapter = AdapterPath(write_adapter(tmp_path / "lora.gguf", pairs, architecture=family))
    expected, found = (
        PagedDecoder(decoder_with(file, adapter)).feed({0: TOKENS}) for file in (path, other)
    )
    assert torch.equal(found, expected) and not torch.equal(
        expected, PagedDecoder(load_decoder(path)).feed({0: TOKENS})
    )


def test_unused_matrices_may_have_factors(tmp_path) -> None:
    """Converters keep the keys and values of layers that use those of others."""
    path = tmp_path / "tiny.gguf"
    TEXT_MODELS["gemma4"].write(path, "layer_inputs_and_shared_keys")
    unused = {"blk.2.attn_k.weight": np.ones((16, 64), "f4")}
    unused |= {f"blk.2.attn_k.{kind}": np.ones(1, "f4") for kind in ("scale", "input_scale")}
    assert torch.equal(logits(changed(path, tensors=unused)), logits(path))


def test_factors_of_other_shapes_are_unknown_tensors(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    TEXT_MODELS["llama"].write(path)
    tensors = {"blk.0.attn_q.scale": np.ones(2, "f4"), "blk.0.ffn_norm.scale": np.ones(1, "f4")}
    with pytest.raises(ModelFileError, match="2 are not known to this architecture"):
        load_decoder(changed(path, tensors=tensors))
