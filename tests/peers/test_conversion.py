"""Converted files in llama.cpp: it loads every architecture and computes as the checkpoint does."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from model_zoo.convert.convert_folder import convert
from model_zoo.gguf.reader import GGUFFile
from model_zoo.tokenizers.vocabulary import TokenType, read_vocabulary
from tests.families.agreement import load_decoder
from tests.families.encoder_configs import ENCODERS
from tests.families.falling_twins import BAICHUAN_13B
from tests.families.olmo_families import ROPES
from tests.families.paged_decoder import PagedDecoder
from tests.families.text_families import TEXT_MODELS
from tests.families.text_family import Changes, changed, rope
from tests.families.vision_configs import glm4v_config
from tests.gguf_files import matrices, rewrite
from tests.peers.llama_cpp_library import llama_cpp, their_log_probabilities
from tests.tiny_models import tiny_tokenizer, write_tiny, write_tiny_folder

TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 300, 70)]
# llama.cpp's table of GELU has half precision.
NEAR_NATS = 0.02
NEAR_NATS_OF_FAMILY = {"gpt-oss": 0.1}  # of MXFP4, whose activations it rounds to 8 bits
DELTA_RULE = ("qwen3next", "qwen35", "qwen35moe")
# Settings in place of those that llama.cpp lacks, for every configuration of a family.
SETTINGS: Mapping[str, Changes] = {
    "baichuan": {"num_hidden_layers": 32},  # rotation in models of this depth only
    "dots1": {"num_key_value_heads": 4},  # as many key heads as heads
    "olmoe": {"num_key_value_heads": 4},
    "gpt-oss": rope(150000.0),  # with YaRN it rounds the ends of the range to whole frequencies
    "rwkv7": {"head_dim": 64},  # it writes beyond the states of other heads
    # One size of chunks and one temperature, the published models'.
    "llama4": {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1},
    # States are square.
    **{key: {"linear_key_head_dim": 32, "linear_value_head_dim": 32} for key in DELTA_RULE},
}
ONE_BASE = {"rope_parameters": ROPES | {"sliding_attention": rope(10000.0)["rope_parameters"]}}
SETTINGS_OF_ONE: Mapping[tuple[str, str], Changes] = {
    ("command-r", "plain"): {"num_hidden_layers": 64},  # norms in models of this depth only
    ("command-r", "biases_without_head_norms"): {"attention_bias": False},
    # Weights of experts that are not divided by their sum.
    **{
        (family, "tied_and_renormalised"): {"norm_topk_prob": False}
        for family in ("deepseek", "qwen2moe")
    },
    ("exaone4", "plain"): {"num_hidden_layers": 64},  # windows in models of this depth only
    ("plamo2", "plain"): {"attention_window_size": 100},  # it knows no windows
    ("smallthinker", "plain"): {"sliding_window_size": 4096},  # whatever the file states
    ("starcoder2", "window_with_own_head"): {"sliding_window": None},
    ("nemotron", "tied_with_biases"): {"head_dim": 16},  # heads as wide as hidden / heads
    ("olmo", "tied_without_clip"): {"attention_bias": False},
    ("olmo3", "every_other_layer_full_with_yarn"): ONE_BASE | {"attention_bias": False},
}
# Configurations that it does not know, of a family separated by spaces.
UNKNOWN = {
    # Families: one of Ollama's own, and one whose layers it knows in the published number only.
    "mllama": "plain cross_attention_in_the_last_layer as_many_kv_heads_as_heads",
    "gemma3n": "plain no_shared_kv_layers another_active_stream published_rope_bases no_sparsity "
    "window_of_one unscaled_correction scaled_global_positions gates_of_several_widths "
    "another_cap_of_logits",
    # Biases.
    "arcee": "tied_with_biases",
    "cohere2": "every_other_layer_full_with_biases",
    "dots1": "groups_with_biases",
    "ernie4_5": "biases_and_own_head",
    "gemma": "one_kv_head_with_biases",
    "gemma4": "biases",
    "granitehybrid": "attention_last_tied",
    "hunyuan-dense": "tied_with_biases",
    "jais2": "tied_without_biases",
    "mimo2": "biases_without_dense_layer",
    "olmoe": "all_experts_per_token_with_biases_and_yarn",
    "paddleocr": "biases_and_own_head",
    "qwen3": "biases",
    "seed_oss": "all_biases",
    "smollm3": "tied_with_biases_and_yarn",
    "bitnet": "plain",  # it computes SiLU
    # Queries of full rank in models of unpublished sizes, groups of V2, several dense layers;
    # compressed queries of Kimi Linear.
    "deepseek2": "plain yarn large glm_flash_with_two_dense_layers",
    "kimi-linear": "compressed_queries_and_groups",
    "minicpm3": "queries_of_full_rank",
    # Of factors for a whole head, half of which is rotated, it takes the first.
    "step35": "scaled_rotation",
    # Layers without experts between those that have them.
    "ernie4_5-moe": "every_other_layer_without_shared_expert",
    # Experts of groups compute from the results of the others.
    "grovemoe": "plain",
    # Layers without a window that are not the first of four.
    "laguna": "window_in_the_first_layer",
    # Layers with a window have another base of rotation.
    "mellum": "plain",
    # Windows in all layers.
    "exaone4": "window_of_no_layer text_of_a_vision_model",  # the latter of another depth
    "phi3": "window",
    "gpt-oss": "short_original_context",
    # Choices of experts without biases, or without dividing the weights by their sum.
    "lfm2moe": "scores_neither_biased_nor_renormalised",
    "qwen3moe": "expert_weights_not_normalized",
    # It reads the limits of YaRN's range in some architectures only.
    "llama": "yarn_with_all_parameters",
    # It derives temperature, norms and rotation of layers from the published sizes.
    "llama4": "chunks_of_one no_temperature no_qk_norms every_other_layer_global",
    "qwen3next": "expert_weights_not_normalized",
    # States that are not square, in whole configurations.
    "qwen35": "text_of_a_vision_model",
    "qwen35moe": "text_of_a_vision_model",
    # It norms by squares instead of deviations, and divides the weights of experts by their sum.
    "phimoe": "plain window_and_short_factors",
    "gemma2": "no_caps",  # it divides by a cap of 0
    "deci": "attention_without_feed_forward",  # it leaves out such layers
    "mamba2": "one_group_tied_without_biases",  # it requires the bias of the convolution
    # It has no biases of the projections of Mamba layers, and requires that of the convolution.
    "jamba": "recurrent_last_layer_dense_tied",
    "mamba": "own_head_and_biases",
    # It ends with a failed assertion or a segmentation fault.
    "falcon-h1": "tied_without_convolution_bias",
    "lfm2": "attention_everywhere",
    "nemotron_h": "one_group_attention_last",
}
COMPARED = [
    (family, name)
    for family, models in TEXT_MODELS.items()
    for name in models.configs
    if name not in UNKNOWN.get(family, "").split()
]
TEXT = "the quick brown fox says: don't! 12 straße\n\n  東京 <|im_end|>"


@pytest.mark.parametrize("family, name", COMPARED)
def test_llama_cpp_computes_what_the_checkpoint_does(family, name, tmp_path) -> None:
    changes = dict(SETTINGS.get(family, {})) | dict(SETTINGS_OF_ONE.get((family, name), {}))
    twin = TEXT_MODELS[family].write(tmp_path / "out.gguf", name, **changes)
    with torch.inference_mode():
        expected = twin(input_ids=torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    found = their_log_probabilities(tmp_path / "out.gguf", TOKENS)
    near = NEAR_NATS_OF_FAMILY.get(family, NEAR_NATS)
    assert (found - expected).abs().max() < near


def test_llama_cpp_takes_the_first_factors_of_step_35(tmp_path) -> None:
    """It computes as the checkpoint does with those that belong to the rotated half of a head."""
    path = tmp_path / "out.gguf"
    twin = TEXT_MODELS["step35"].write(path, "scaled_rotation")
    with torch.inference_mode():
        expected = twin(input_ids=torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    factors = matrices(path)["rope_freqs.weight"]
    theirs = changed(path, tensors={"rope_freqs.weight": np.tile(factors[::2], 2)})
    found = their_log_probabilities(theirs, TOKENS)
    assert (found - expected).abs().max() < NEAR_NATS


def test_scores_of_baichuan_13b_fall_in_llama_cpp_too(tmp_path) -> None:
    twin = TEXT_MODELS["baichuan"].write(tmp_path / "out.gguf", **BAICHUAN_13B)
    with torch.inference_mode():
        expected = twin(input_ids=torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    found = their_log_probabilities(tmp_path / "out.gguf", TOKENS)
    assert (found - expected).abs().max() < NEAR_NATS


def test_llama_cpp_reads_glm4_with_sections_as_the_text_model_of_glm_4v(tmp_path) -> None:
    twin = write_tiny(tmp_path / "out.gguf", glm4v_config())
    with torch.inference_mode():
        expected = twin(input_ids=torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    found = their_log_probabilities(tmp_path / "out.gguf", TOKENS)
    assert (found - expected).abs().max() < NEAR_NATS


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


@pytest.mark.parametrize(
    "texts",
    [
        ("<|end|>",),
        ("<|end|>", "<|return|>", "<|call|>"),
        ("<|end|>", "<|flush|>", "<|calls|>"),
        ("[e~[",),
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_prefix|>"),
        ("<fim-pad>", "<fim-repo>", "<file_sep>"),
        ("[PAD]", "<reponame>", "<fim_middle>"),
    ],
)
def test_llama_cpp_stops_at_the_same_texts(tmp_path, texts) -> None:
    TEXT_MODELS["qwen3"].write(tmp_path / "plain.gguf")
    keys, count = dict(GGUFFile.open(tmp_path / "plain.gguf").metadata), len(texts)
    tokens, types = (list(keys[f"tokenizer.ggml.{key}"]) for key in ("tokens", "token_type"))
    tokens[:count] = texts
    types = [int(TokenType.USER_DEFINED)] * count + [int(kind) for kind in types[count:]]
    keys = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    path = rewrite(tmp_path / "plain.gguf", tmp_path / "changed.gguf", keys=keys)
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    vocabulary = llama_cpp.llama_model_get_vocab(model.model)
    found = {id for id in range(len(tokens)) if llama_cpp.llama_vocab_is_eog(vocabulary, id)}
    model.close()
    assert found == read_vocabulary(GGUFFile.open(path).metadata).end_tokens


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


def test_llama_cpp_multiplies_queries_by_the_temperature_of_mistral_large_3(tmp_path) -> None:
    TEXT_MODELS["deepseek2"].write(tmp_path / "out.gguf", "v3")
    found = {}
    for scale in (0.0, 0.5):
        keys = {"attention.temperature_scale": scale, "attention.temperature_length": 8}
        path = changed(tmp_path / "out.gguf", keys)
        ours = PagedDecoder(load_decoder(path)).feed({0: TOKENS}).log_softmax(-1)
        found[scale] = their_log_probabilities(path, TOKENS)
        assert (found[scale] - ours)[ours.isfinite()].abs().max() < NEAR_NATS
    assert (found[0.5] - found[0.0]).abs().max() > 2 * NEAR_NATS
