"""Converted files in llama.cpp: it loads every architecture and computes as the checkpoint does."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from model_zoo.convert.convert_folder import convert
from tests.families.encoder_configs import ENCODERS
from tests.families.olmo_families import ROPES
from tests.families.text_families import TEXT_MODELS
from tests.families.text_family import Changes, rope
from tests.peers.llama_cpp_library import llama_cpp, their_log_probabilities
from tests.tiny_models import tiny_tokenizer, write_tiny, write_tiny_folder

TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 300, 70)]
# llama.cpp keeps keys, values and its table of GELU in half precision.
NEAR_NATS = 0.1
WITH_DELTA_RULE = ("qwen3next", "qwen35", "qwen35moe")
NEAR_NATS_WITH_DELTA_RULE = 0.01
# It knows as many key heads as heads only.
ALL_KEYS = {"num_key_value_heads": 4}
# Its states are square.
SQUARE = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
PUBLISHED_CHUNKS = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
ONE_BASE = {"rope_parameters": ROPES | {"sliding_attention": rope(10000.0)["rope_parameters"]}}
# What is compared of families of which it is not "plain" alone: configurations, and settings in
# place of those that llama.cpp lacks.
IN_LLAMA_CPP: Mapping[str, Mapping[str, Changes]] = {
    "apertus": {"llama3_rope": {}},
    # It knows queries of full rank in models of the published depths only, and no groups of V2.
    "deepseek2": {"v3": {}, "glm_flash": {}},
    "dots1": {"plain": ALL_KEYS},
    # It knows windows in models of this depth only.
    "exaone4": {"tied_without_windows": {}, "plain": {"num_hidden_layers": 64}},
    "gemma3": {"scaled_global_positions": {}},
    "gemma3n": {},  # it knows only so many layers with keys as the published models have
    "gemma4": {
        "plain": {},
        "keys_as_values": {},
        "experts": {},
        "layer_inputs_and_shared_keys": {},
    },
    "glm4moe": {"plain": {}, "groups_without_head_norms": {}},
    # With YaRN it rounds the ends of the range to whole frequencies, which this family does not.
    "gpt-oss": {"plain": rope(150000.0)},
    "granitehybrid": {"plain": {}, "dense_with_rotation_and_groups": {}},
    "hunyuan-dense": {"stretched_base": {}},
    "llama": {"llama3_rope": {}},
    # It knows one size of chunks and one temperature only, the published models'.
    "llama4": {"experts_in_every_other_layer": PUBLISHED_CHUNKS},
    "mistral3": {"plain": {}, "text_of_a_vision_model": {}},
    "mllama": {},  # an architecture of Ollama's own
    # It knows neither biases nor a second base.
    "olmo3": {
        "plain": {},
        "every_other_layer_full_with_yarn": ONE_BASE | {"attention_bias": False},
    },
    "olmo2": {"plain": {}, "tied": {}},
    "olmoe": {"plain": ALL_KEYS},
    "phi3": {"short_factors": {}, "beyond_the_original_context": {}},
    "qwen2": {"plain": {}, "yarn": {}},
    "qwen3": {"tied": {}},
    **{family: {"plain": SQUARE} for family in WITH_DELTA_RULE},
}
COMPARED = [
    (family, name) for family in TEXT_MODELS for name in IN_LLAMA_CPP.get(family, {"plain": {}})
]
TEXT = "the quick brown fox says: don't! 12 straße\n\n  東京 <|im_end|>"


@pytest.mark.parametrize("family, name", COMPARED)
def test_llama_cpp_computes_what_the_checkpoint_does(family, name, tmp_path) -> None:
    changes = IN_LLAMA_CPP.get(family, {}).get(name, {})
    twin = TEXT_MODELS[family].write(tmp_path / "out.gguf", name, **changes)
    with torch.inference_mode():
        expected = twin(input_ids=torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    found = their_log_probabilities(tmp_path / "out.gguf", TOKENS)
    near = NEAR_NATS_WITH_DELTA_RULE if family in WITH_DELTA_RULE else NEAR_NATS
    assert (found - expected).abs().max() < near


@pytest.mark.parametrize("name", ENCODERS)
def test_llama_cpp_embeds_as_the_checkpoint_does(name, tmp_path) -> None:
    path, text = tmp_path / "out.gguf", "the quick brown fox jumps over the lazy dog. " * 4
    twin = write_tiny(path, ENCODERS[name], maker=AutoModel)
    with torch.inference_mode():
        states = twin(torch.tensor([tiny_tokenizer().encode(text).ids])).last_hidden_state[0]
    model = llama_cpp.Llama(
        str(path), embedding=True, pooling_type=1, n_ctx=64, n_threads=1, verbose=False
    )
    found = torch.tensor(model.embed(text))
    model.close()
    assert torch.allclose(found, states.mean(0), atol=0.02)


def test_llama_cpp_cuts_text_as_the_checkpoint_does(tmp_path) -> None:
    path: Path = tmp_path / "out.gguf"
    TEXT_MODELS["qwen3"].write(path)
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    found = model.tokenize(TEXT.encode(), add_bos=False, special=True)
    assert found == tiny_tokenizer().encode(TEXT).ids
    assert model.token_eos() == tiny_tokenizer().token_to_id("<|im_end|>")
    model.close()


def test_llama_cpp_stops_at_all_end_tokens_of_the_checkpoint(tmp_path) -> None:
    folder, path = tmp_path / "folder", tmp_path / "out.gguf"
    write_tiny_folder(folder, TEXT_MODELS["qwen3"].config())
    ends = [tiny_tokenizer().token_to_id("<|im_end|>"), 40, 50]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends[:2]}))
    convert(folder, path)
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    vocabulary = llama_cpp.llama_model_get_vocab(model.model)
    found = [llama_cpp.llama_vocab_is_eog(vocabulary, token) for token in ends]
    model.close()
    assert found == [True, True, False]
