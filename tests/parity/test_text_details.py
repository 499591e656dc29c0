"""Details of single text families that the checks of all families do not cover."""

import pytest
import torch
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.mistral4.modeling_mistral4 import get_llama_4_attn_scale

from model_zoo.gguf.reader import GGUFFile
from runtime.errors import ModelFileError
from runtime.kv.cache_kinds import Sliding
from tests.families.agreement import (
    CHECKS,
    PROMPT,
    TOLERANCE,
    Pair,
    check_bits_alone_and_in_a_batch,
    check_long_prompt,
    load_decoder,
    random_tokens,
)
from tests.families.gemma_families import GEMMA3_SCALED_LAYERS, gemma3_scaled
from tests.families.image_rows import OPTIONS
from tests.families.paged_decoder import PagedDecoder
from tests.families.text_families import TEXT_MODELS
from tests.families.text_family import changed, pair_of
from tests.families.vision_configs import glm4v_config
from tests.gguf_files import rewrite
from tests.tiny_models import tiny_tokenizer, write_tiny


def difference(pair: Pair, tokens: list[int]) -> float:
    return pair.worst(PagedDecoder(pair.decoder).feed({0: tokens}), pair.expected(tokens))


def test_the_served_context_chooses_the_factors_of_phi3(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = TEXT_MODELS["phi3"].write(path, "beyond_the_original_context")
    tokens = random_tokens(16, seed=1)
    assert difference(pair_of(path, twin, context_tokens=16), tokens) <= TOLERANCE
    assert difference(pair_of(path, twin), tokens) > 10 * TOLERANCE


def test_phi3_serves_the_context_of_the_file_by_default(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = TEXT_MODELS["phi3"].write(path, "beyond_the_original_context")
    check_long_prompt(pair_of(path, twin))


@pytest.mark.parametrize("layers", GEMMA3_SCALED_LAYERS)
def test_gemma3_that_states_no_scaling_is_not_scaled(tmp_path, layers) -> None:
    """Global positions of the larger models are scaled where a file states nothing."""
    path = tmp_path / "tiny.gguf"
    twin = TEXT_MODELS["gemma3"].write(path, flavour="ollama", **gemma3_scaled(layers))
    keys = {"rope.scaling.type": "none", "rope.scaling.factor": None}
    pair = pair_of(changed(path, keys), twin)
    assert difference(pair, random_tokens(PROMPT, seed=20)) > TOLERANCE


def test_gemma3_whose_window_is_the_whole_context_is_not_scaled(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    sizes = {"sliding_window": 512, "max_position_embeddings": 512}
    twin = TEXT_MODELS["gemma3"].write(
        path, flavour="ollama", num_hidden_layers=GEMMA3_SCALED_LAYERS[0], **sizes
    )
    assert difference(pair_of(path, twin), random_tokens(PROMPT, seed=20)) <= TOLERANCE


@pytest.mark.parametrize(
    "config, base, context",
    [
        ("more_key_heads", None, 8192),
        ("more_key_heads", 10000.0, 2048),
        ("two_norms", None, 2048),
    ],
)
def test_the_context_of_falcon_2_is_the_trained_one(tmp_path, config, base, context) -> None:
    """llama.cpp's converter states 2,048 for all models, and no base of rotation."""
    path = tmp_path / "tiny.gguf"
    TEXT_MODELS["falcon"].write(path, config, max_position_embeddings=2048)
    assert load_decoder(changed(path, {"rope.freq_base": base})).context_length == context


def test_gemma4_caches_have_the_shapes_of_local_and_of_global_layers(tmp_path) -> None:
    shared = TEXT_MODELS["gemma4"].configs["layer_inputs_and_shared_keys"]
    changes = {key: shared[key] for key in ("num_kv_shared_layers", "use_double_wide_mlp")}
    pair = TEXT_MODELS["gemma4"].pair(tmp_path / "tiny.gguf", "keys_as_values", **changes)
    layers = pair.decoder.cache_layers
    shapes = [(cache.kv_heads, cache.key_dim, cache.value_dim) for cache in layers]
    assert shapes == [(2, 8, 8), (1, 16, 16)]  # the other two layers share them


@pytest.mark.parametrize("flavour", ["llama.cpp", "ollama"])
def test_files_of_deepseeks_architecture_may_have_a_temperature(
    tmp_path, monkeypatch, flavour
) -> None:
    """As Mistral Large 3 has it; in `transformers`, Mistral 4 multiplies queries by it."""
    path, scale, length = tmp_path / "tiny.gguf", 0.3, 8
    twin = TEXT_MODELS["deepseek2"].write(path, "v3", flavour=flavour)
    attend = modeling_deepseek_v3.eager_attention_forward

    def tempered(module, query, *arguments, **options):
        positions = torch.arange(query.shape[2])[None]
        factor = get_llama_4_attn_scale(positions, scale, length)
        return attend(module, query * factor, *arguments, **options)

    monkeypatch.setattr(modeling_deepseek_v3, "eager_attention_forward", tempered)
    tokens = random_tokens(PROMPT, seed=1)
    assert difference(pair_of(path, twin), tokens) > 10 * TOLERANCE
    keys = {"attention.temperature_scale": scale, "attention.temperature_length": length}
    for check in (*CHECKS.values(), check_bits_alone_and_in_a_batch):
        check(pair_of(changed(path, keys), twin))


def test_missing_keys_of_gemma4_have_the_published_values(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    published = {"head_dim": 256, "global_head_dim": 512, "num_hidden_layers": 6}
    TEXT_MODELS["gemma4"].write(path, layer_types=None, rope_parameters=None, **published)
    missing = """
        attention.layer_norm_rms_epsilon attention.key_length attention.value_length
        attention.key_length_swa attention.value_length_swa attention.sliding_window_pattern
        attention.shared_kv_layers rope.freq_base rope.freq_base_swa rope.dimension_count
        rope.dimension_count_swa embedding_length_per_layer_input
    """
    silent = changed(path, dict.fromkeys(missing.split()))
    tokens = random_tokens(PROMPT, seed=21)
    logits = [PagedDecoder(load_decoder(file)).feed({0: tokens}) for file in (path, silent)]
    assert torch.equal(*logits)


def test_ollamas_files_of_gpt_oss_have_other_names(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    TEXT_MODELS["gpt-oss"].write(path, flavour="ollama")
    names = set(GGUFFile.open(path).tensors)
    assert {"blk.0.attn_out.weight", "blk.0.attn_sinks", "blk.0.ffn_norm.weight"} <= names


@pytest.mark.parametrize("family", ["qwen35", "qwen35moe"])
def test_ollamas_files_of_qwen35_state_key_heads_of_each_layer(tmp_path, family) -> None:
    """None for layers without attention; tensors have other names too."""
    path = tmp_path / "tiny.gguf"
    TEXT_MODELS[family].write(path, flavour="ollama")
    file = GGUFFile.open(path)
    assert list(file.metadata[f"{family}.attention.head_count_kv"]) == [0, 0, 0, 2]
    assert "blk.0.ssm_dt" in file.tensors


@pytest.mark.parametrize(("stated", "seen"), [(9, 9), (128, 129), (129, 129)])
def test_the_published_window_of_mimo2_does_not_count_the_token_itself(
    tmp_path, stated, seen
) -> None:
    """llama.cpp's converter copies the setting; that of this project writes 129."""
    path = tmp_path / "tiny.gguf"
    TEXT_MODELS["mimo2"].write(path)
    near = load_decoder(changed(path, {"attention.sliding_window": stated})).cache_layers[1]
    assert near.kind == Sliding(seen)


def test_mllama_without_a_size_of_images_agrees_and_caches_none(tmp_path) -> None:
    twin = write_tiny(tmp_path / "text.gguf", TEXT_MODELS["mllama"].config(), **OPTIONS)
    decoder = load_decoder(tmp_path / "text.gguf")
    assert decoder.cache_layers[1].kind.capacity(100) == 0
    check_long_prompt(Pair(decoder, twin, tiny_tokenizer().get_vocab_size()))


def test_llama4_may_be_dense_with_rotation_and_without_chunks(tmp_path) -> None:
    """As in files of MobileLLM-R1, which state a window and an interval of 0."""
    path, stated = tmp_path / "tiny.gguf", {"attention.sliding_window": 0, "use_qk_norm": None}
    stated |= {"interleave_moe_layer_step": 0, "expert_count": 0, "expert_used_count": None}
    twin = TEXT_MODELS["llama4"].write(path, interleave_moe_layer_step=6)
    assert not any(layer.is_moe_layer for layer in twin.model.layers)
    twin.config.layer_types = ["full_attention"] * len(twin.model.layers)
    for layer in twin.model.layers:
        layer.self_attn.use_rope = True
        layer.self_attn.qk_norm = twin.model.layers[0].self_attn.qk_norm
    check_long_prompt(pair_of(changed(path, stated), twin))


@pytest.mark.parametrize("name", ["alpha_p", "alpha_n", "beta", "eps"])
def test_apertus_reads_the_numbers_of_its_activation_by_layer(tmp_path, name) -> None:
    path, other, key = tmp_path / "tiny.gguf", tmp_path / "other.gguf", f"xielu.{name}"
    twin = TEXT_MODELS["apertus"].write(path)
    for value, said in ((None, "is missing"), ([0.5], "has 1 entries for 2 layers")):
        with pytest.raises(ModelFileError, match=f"`{key}` {said}"):
            load_decoder(rewrite(path, other, keys={key: value}))
    tokens, found = random_tokens(PROMPT, seed=22), []
    for value in ([-0.5, -0.5], -0.5):
        pair = pair_of(rewrite(path, other, keys={key: value}), twin)
        assert difference(pair, tokens) > 10 * TOLERANCE
        found.append(PagedDecoder(pair.decoder).feed({0: tokens}))
    assert torch.equal(*found)


@pytest.mark.parametrize("check", ["logits", "rotations_of_cached_keys"])
def test_glm4_with_sections_is_the_text_model_of_glm_4v(tmp_path, check) -> None:
    path = tmp_path / "tiny.gguf"
    CHECKS[check](pair_of(path, write_tiny(path, glm4v_config())))


def test_glm4_whose_sections_are_empty_is_rotated_as_without_them(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = TEXT_MODELS["glm4"].write(path)
    empty = changed(path, {"rope.dimension_sections": [0, 0, 0, 0]})
    check_long_prompt(pair_of(empty, twin))
