"""Quantised files in llama.cpp: it loads them, computes what we compute, and chooses the same
types."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from model_zoo.convert.quantize import quantize_file
from model_zoo.convert.recipes import RECIPES
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import TensorScope
from model_zoo.models.llama.text import build_decoder
from tests.families.paged_decoder import PagedDecoder
from tests.gguf_files import block_types, finish, values_with_types
from tests.peers.llama_cpp_library import their_file, their_log_probabilities
from tests.tiny_models import TinyLlama, write_tiny_llama

TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 300, 40)]
SIZES = TinyLlama(hidden=256, layers=10, heads=8, kv_heads=2, head_dim=32, feed_forward=512)
QUANTISED = [name for name, recipe in RECIPES.items() if not recipe.plain]
# llama.cpp rounds the inputs of a product to 8 bits, we do not: so far apart may they be.
NEAR_NATS = 0.03
# A random model has no layers to spare, and roundings tell by chance, so a little more than 5%.
NO_WORSE = 1.1


@dataclass(frozen=True)
class Names:
    """A model of every kind of tensor that recipes tell apart, each of them small.

    attention_every, ffn_every: one of so many layers has these matrices.
    """

    layers: int = 16
    heads: int = 8
    kv_heads: int = 2
    experts: int = 0
    tied: bool = False
    fused: bool = False
    attention_every: int = 1
    ffn_every: int = 1

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(self.layers)
        writer.add_context_length(64)
        writer.add_embedding_length(256)
        writer.add_feed_forward_length(256)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_layer_norm_rms_eps(1e-5)
        if self.experts:
            writer.add_expert_count(self.experts)
            writer.add_expert_used_count(2)
        random = np.random.default_rng(0)
        for name, shape in self._shapes().items():
            writer.add_tensor(name, random.normal(size=shape).astype(np.float32))
        finish(writer)
        return path

    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        outer: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (8, 256),
            "per_layer_token_embd.weight": (8, 256),
            "output_norm.weight": (256,),
        }
        if not self.tied:
            outer["output.weight"] = (8, 256)
        layers = {
            f"blk.{n}.{name}": shape
            for n in range(self.layers)
            for name, shape in self._layer(n).items()
        }
        return {**outer, **layers}

    def _layer(self, number: int) -> dict[str, tuple[int, ...]]:
        layer: dict[str, tuple[int, ...]] = {"attn_norm.weight": (256,)}
        if number % self.attention_every == self.attention_every - 1:
            layer |= {"attn_output.weight": (8, 256)} | self._attention()
        if number % self.ffn_every == self.ffn_every - 1:
            layer |= self._feed_forward()
        return layer

    def _feed_forward(self) -> dict[str, tuple[int, ...]]:
        if self.experts:
            parts = ("gate", "up", "down")
            stacks = {f"ffn_{part}_exps.weight": (self.experts, 4, 256) for part in parts}
            return {"ffn_gate_inp.weight": (self.experts, 256), **stacks}
        return {
            "ffn_gate.weight": (8, 256),
            "ffn_up.weight": (8, 288),
            "ffn_down.weight": (8, 512),
        }

    def _attention(self) -> dict[str, tuple[int, ...]]:
        if self.fused:
            return {"attn_qkv.weight": (8, 256)}
        return {
            "attn_q.weight": (8, 256),
            "attn_k.weight": (8, 288),
            "attn_v.weight": (8, 256),
            "attn_v.bias": (8,),
        }


NAMES = {
    "plain": Names(kv_heads=8),
    "shared_keys": Names(),
    "tied": Names(tied=True),
    "fused": Names(fused=True),
    "odd_layers": Names(layers=27),
    "four_experts": Names(experts=4),
    "eight_experts": Names(experts=8),
    "few_attention_layers": Names(layers=24, attention_every=4),
    "experts_and_few_attention_layers": Names(layers=24, experts=4, attention_every=3, ffn_every=2),
    "few_feed_forward_layers": Names(layers=32, attention_every=5, ffn_every=2),
    "eighty_layers": Names(layers=80, heads=64, kv_heads=8),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("source") / "tiny.gguf"
    write_tiny_llama(path, config=SIZES, type="F16")
    return path


@pytest.mark.parametrize("recipe", RECIPES)
def test_llama_cpp_computes_what_we_compute(source, tmp_path, recipe):
    path = quantize_file(source, tmp_path / "q.gguf", recipe)
    assert (
        divergence(their_log_probabilities(path, TOKENS), our_log_probabilities(path)) < NEAR_NATS
    )


@pytest.mark.parametrize("recipe", QUANTISED)
def test_a_model_suffers_no_more_than_from_llama_cpp(source, tmp_path, recipe):
    before = our_log_probabilities(source)
    ours = our_log_probabilities(quantize_file(source, tmp_path / "q.gguf", recipe))
    number = RECIPES[recipe].file_type
    theirs = our_log_probabilities(their_file(source, tmp_path / "theirs.gguf", number))
    assert divergence(before, ours) <= NO_WORSE * divergence(before, theirs)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("names", NAMES)
def test_every_tensor_gets_the_type_that_llama_cpp_gives_it(tmp_path, names, recipe):
    source = NAMES[names].write(tmp_path / "s.gguf")
    ours = quantize_file(source, tmp_path / "ours.gguf", recipe)
    theirs = their_file(source, tmp_path / "theirs.gguf", RECIPES[recipe].file_type)
    assert block_types(ours) == block_types(theirs)


@pytest.mark.parametrize("recipe", ["q8_0", "q4_k_m"])
def test_the_metadata_is_what_llama_cpp_writes(source, tmp_path, recipe):
    ours = quantize_file(source, tmp_path / "ours.gguf", recipe)
    theirs = their_file(source, tmp_path / "theirs.gguf", RECIPES[recipe].file_type)
    assert values_with_types(ours) == values_with_types(theirs)


def our_log_probabilities(path: Path) -> Tensor:
    """[tokens, vocabulary] float32."""
    file = GGUFFile.open(path)
    scope = TensorScope(file, device=torch.device("cpu"), dtype=torch.float32)
    decoder = build_decoder(scope, Metadata(file.metadata, path=path))
    return PagedDecoder(decoder).feed({0: TOKENS}).log_softmax(-1)


def divergence(expected: Tensor, found: Tensor) -> float:
    """Kullback-Leibler, in nats, the mean over the tokens."""
    return (expected.exp() * (expected - found)).sum(-1).mean().item()
