"""The benchmark model: the file is what the `gguf` package and `transformers` expect."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, quants
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bench.make_model import (
    LABELS,
    MOE,
    MOE_SHAPE,
    WEIGHT_DEVIATION,
    Shape,
    ensure_model,
    kind_of,
    llama3_rope_factors,
)
from bench.report import Row
from bench.vocabulary import SIZE, Vocabulary, synthetic_vocabulary
from model_zoo.registry import load

SMALL = Shape(layers=2, hidden=256, feed_forward=512, heads=4, kv_heads=2, head_dim=64)


def few_tokens() -> Vocabulary:
    return Vocabulary("few", ["a", "b", "Ġc", "<|end|>"], [1, 1, 1, 3], ["a b"], 3, 3)


@pytest.mark.parametrize("label", LABELS)
def test_weights_of_every_type_have_the_same_deviation(label: str, tmp_path: Path) -> None:
    path = ensure_model(tmp_path, label, few_tokens(), SMALL)
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    assert len(tensors) == 3 + 9 * SMALL.layers
    for name in ("blk.0.attn_q.weight", "blk.1.ffn_down.weight"):
        tensor = tensors[name]
        assert label in (tensor.tensor_type.name, "Q4_K_M")
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        assert values.std() == pytest.approx(WEIGHT_DEVIATION, rel=0.1)
        assert abs(values.mean()) < WEIGHT_DEVIATION / 20


def test_the_mix_has_the_finer_type_where_llama_cpp_puts_it() -> None:
    """In the first and last eighth of the layers, and in every third one between them."""
    finer = [kind_of("Q4_K_M", "ffn_down", layer, 16).name == "Q6_K" for layer in range(16)]
    assert [layer for layer, is_finer in enumerate(finer) if is_finer] == [
        0,
        1,
        4,
        7,
        10,
        13,
        14,
        15,
    ]
    assert kind_of("Q4_K_M", "token_embd", 5, 16).name == "Q6_K"
    assert kind_of("Q4_K_M", "ffn_up", 0, 16).name == "Q4_K"


def test_this_engine_loads_the_mixture_of_experts(tmp_path: Path) -> None:
    small = replace(MOE_SHAPE, layers=2, hidden=256, feed_forward=256, heads=4, head_dim=64)
    path = ensure_model(tmp_path, MOE, few_tokens(), small)
    model = load(path, device=torch.device("cpu"), dtype=torch.float32)
    assert model.description.architecture == "qwen3moe"


def test_a_draft_model_is_the_first_layers_of_its_target(tmp_path: Path) -> None:
    target = replace(SMALL, name="target", layers=3, first=1, further=0.25)
    draft, other = (
        replace(SMALL, name=f"draft-{seed}", layers=1, seed=seed) for seed in (target.seed, 2)
    )
    found = []
    for shape in (target, draft, other):
        path = ensure_model(tmp_path, "Q4_0", few_tokens(), shape)
        found.append({tensor.name: tensor.data for tensor in GGUFReader(path).tensors})
    whole, first, different = found
    assert all(np.array_equal(whole[name], data) for name, data in first.items())
    assert not np.array_equal(whole["blk.0.attn_q.weight"], different["blk.0.attn_q.weight"])
    scales = [whole[f"blk.{layer}.ffn_norm.weight"].max() for layer in range(target.layers)]
    assert scales == [1, 0.25, 0.25]


@pytest.mark.parametrize("label", LABELS)
def test_only_plain_text_tokens_have_an_embedding(label: str, tmp_path: Path) -> None:
    path = ensure_model(tmp_path, label, few_tokens(), SMALL)
    (embedding,) = (t for t in GGUFReader(path).tensors if t.name == "token_embd.weight")
    values = quants.dequantize(embedding.data, embedding.tensor_type)
    assert np.any(values != 0, axis=1).tolist() == [True, True, True, False]


def test_rope_factors_are_those_of_llama_3_2() -> None:
    shape = Shape()
    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": shape.rope_base,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = shape.rope_base ** (-np.arange(0, shape.head_dim, 2) / shape.head_dim)
    assert llama3_rope_factors(shape) == pytest.approx(plain / scaled.numpy(), rel=1e-5)


def test_synthetic_vocabulary_has_every_byte_and_only_mergeable_tokens() -> None:
    vocabulary = synthetic_vocabulary()
    known = set(vocabulary.tokens)
    assert len(vocabulary.tokens) == len(known) == len(vocabulary.types) == SIZE
    assert len({token for token in known if len(token) == 1}) == 256
    for merge in vocabulary.merges:
        left, right = merge.split(" ")
        assert {left, right, left + right} <= known


def test_ratio_is_the_median_of_the_rounds_not_of_the_values() -> None:
    # The second round was disturbed, for both alike.
    row = Row("Q4_0", "decode", "tokens/s", first=(10.0, 2.0, 30.0), second=(5.0, 1.0, 10.0))
    assert row.ratio == 2.0
