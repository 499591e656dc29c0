"""Conversion of checkpoints in their authors' layout, where `transformers` saves another layout."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from model_zoo.convert.convert_folder import convert
from model_zoo.gguf.reader import GGUFFile
from runtime.errors import UnsupportedModelError
from tests.families.agreement import check_long_prompt, load_decoder
from tests.families.gemma_families import GEMMA4_ROPES, GEMMA4_SCALED_ROPES, GLOBAL, LOCAL
from tests.families.text_families import TEXT_MODELS
from tests.families.text_family import pair_of
from tests.gguf_files import matrices
from tests.tiny_models import tiny_tokenizer, write_tiny, write_tiny_folder


def publish(folder: Path, settings: dict[str, Any], unused: str) -> None:
    """Change a folder of a text model into one with a vision model.

    `settings`: the new config.json. Layer 2 gets keys that it does not use, and `unused` becomes
    the name of a tensor that text models do not have.
    """
    (folder / "config.json").write_text(json.dumps(settings))
    stored = load_file(folder / "model.safetensors")
    parts = {name.replace("model.", "model.language_model."): stored[name] for name in stored}
    keys = parts["model.language_model.layers.0.self_attn.k_proj.weight"]
    parts["model.language_model.layers.2.self_attn.k_proj.weight"] = keys.clone()
    parts[unused] = keys[0].clone()
    save_file(parts, folder / "model.safetensors")


def test_a_published_checkpoint_of_gemma3n_agrees(tmp_path) -> None:
    folder, path = tmp_path / "folder", tmp_path / "tiny.gguf"
    twin = write_tiny_folder(folder, TEXT_MODELS["gemma3n"].config())
    text = json.loads((folder / "config.json").read_text())
    del text["rope_parameters"]
    text |= {"rope_theta": 500.0, "rope_local_base_freq": 100.0, "rope_scaling": None}
    settings = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": text}
    publish(folder, settings, unused="model.embed_vision.embedding.weight")
    convert(folder, path, type="f32")
    assert "blk.2.attn_k.weight" in GGUFFile.open(path).tensors  # llama.cpp needs it
    check_long_prompt(pair_of(path, twin))


def test_a_published_checkpoint_of_gemma4_agrees(tmp_path) -> None:
    folder, path = tmp_path / "folder", tmp_path / "tiny.gguf"
    config = TEXT_MODELS["gemma4"].config("layer_inputs_shared_keys_and_keys_as_values")
    twin = write_tiny_folder(folder, config)
    text = json.loads((folder / "config.json").read_text())
    del text["per_layer_config"]
    text |= {"global_head_dim": 16, "num_global_key_value_heads": 1}
    architectures = ["Gemma4ForConditionalGeneration"]
    settings = {"architectures": architectures, "text_config": text, "vision_config": None}
    publish(folder, settings, unused="model.vision_tower.std_scale")
    convert(folder, path, type="f32")
    assert "blk.2.attn_k.weight" not in GGUFFile.open(path).tensors
    check_long_prompt(pair_of(path, twin))


def test_the_table_of_layer_inputs_of_gemma3n_is_as_long_as_the_vocabulary(tmp_path) -> None:
    path, known = tmp_path / "tiny.gguf", tiny_tokenizer().get_vocab_size()
    write_tiny(path, TEXT_MODELS["gemma3n"].config(), padding_rows=5)
    table = matrices(path)["per_layer_token_embd.weight"]
    assert len(table) == known + 5
    assert (table[known:] == table[0]).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"use_bidirectional_attention": "all"},
        {"rope_parameters": GEMMA4_ROPES | {LOCAL: GEMMA4_SCALED_ROPES[GLOBAL]}},
    ],
    ids=["attention", "rotation"],
)
def test_settings_of_gemma4_that_files_cannot_state_are_refused(tmp_path, changes) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot express"):
        write_tiny(tmp_path / "tiny.gguf", TEXT_MODELS["gemma4"].config(**changes))


@pytest.mark.parametrize(
    ("family", "removed", "settings"),
    [
        (
            "kimi-linear",
            "layer_types mlp_layer_types linear_head_dim linear_num_heads linear_conv_kernel_dim",
            {
                "first_k_dense_replace": 1,
                "linear_attn_config": {
                    "full_attn_layers": [2],
                    "kda_layers": [1, 3],
                    "head_dim": 32,
                    "num_heads": 4,
                    "short_conv_kernel_size": 4,
                },
            },
        ),
        ("exaone-moe", "first_k_dense_replace mlp_layer_types", {"first_last_k_dense_replace": 1}),
        (
            "hy_v3",
            "mlp_layer_types",
            {
                "first_k_dense_replace": 1,
                "moe_router_enable_expert_bias": True,
                "moe_router_use_sigmoid": True,
                "qk_norm": True,
                "route_norm": True,
            },
        ),
        (
            "mimo2",
            "layer_types mlp_layer_types rope_parameters rms_norm_eps",
            {
                "hybrid_layer_pattern": [0, 1, 0],
                "moe_layer_freq": [0, 1, 1],
                "sliding_window": 8,
                "sliding_window_size": 8,
                "rope_theta": 5e6,
                "swa_rope_theta": 500.0,
                "partial_rotary_factor": 0.375,
                "swa_num_key_value_heads": 2,
                "layernorm_epsilon": 1e-5,
                "routed_scaling_factor": None,
            },
        ),
    ],
)
def test_published_settings_mean_those_that_transformers_saves(
    tmp_path, family: str, removed: str, settings: dict[str, Any]
) -> None:
    folder, saved, published = (tmp_path / name for name in ("folder", "saved", "published"))
    write_tiny_folder(folder, TEXT_MODELS[family].config())
    convert(folder, saved, type="f32")
    stated = json.loads((folder / "config.json").read_text())
    stated = {key: value for key, value in stated.items() if key not in removed.split()}
    (folder / "config.json").write_text(json.dumps(stated | settings))
    convert(folder, published, type="f32")
    assert saved.read_bytes() == published.read_bytes()


def test_files_of_mistral4_state_that_a_checkpoint_has_no_temperature(tmp_path) -> None:
    folder, path = tmp_path / "folder", tmp_path / "tiny.gguf"
    write_tiny_folder(folder, TEXT_MODELS["mistral4"].config())
    settings = json.loads((folder / "config.json").read_text())
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(settings))
    convert(folder, path, type="f32")
    assert GGUFFile.open(path).metadata["mistral4.attention.temperature_scale"] == 0
    load_decoder(path)
