"""Settings of published checkpoints in old and new spellings."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model_zoo.convert.configuration import Configuration
from model_zoo.convert.convert_folder import conversion_for
from model_zoo.convert.gguf_metadata import metadata_of
from runtime.errors import ModelFileError, UnsupportedModelError
from tests.tiny_models import tiny_tokenizer

LLAMA_2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
LLAMA_1 = {key: value for key, value in LLAMA_2.items() if key != "num_key_value_heads"}
LLAMA_31 = LLAMA_2 | {
    "eos_token_id": [128001, 128008, 128009],
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
NEMO = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 131072,
}
MISTRAL_SMALL = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "text_config": NEMO | {"rope_theta": 1000000000.0, "intermediate_size": 32768},
    "vision_config": {"model_type": "pixtral", "rope_theta": 10000.0},
}
SMOLLM_3 = LLAMA_2 | {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
QWEN_25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
GEMMA_2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 128,
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 46,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 144,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
    "vocab_size": 256000,
}
GEMMA_3 = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
}
GEMMA_3_TEXT = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 256,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
PHI_3_LONG = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [1.0 + i for i in range(48)],
        "short_factor": [1.0 + i / 48 for i in range(48)],
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": False,
    "vocab_size": 32064,
}
GRANITE_4_H = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "hidden_size": 1536,
    "intermediate_size": 512,
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
    "logits_scaling": 6,
    "mamba_d_head": 64,
    "mamba_d_conv": 4,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "max_position_embeddings": 131072,
    "num_attention_heads": 12,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 40,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000,
    "shared_intermediate_size": 1024,
    "tie_word_embeddings": True,
    "vocab_size": 100352,
}
NEMOTRON_NANO_2 = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "conv_kernel": 4,
    "head_dim": 128,
    "hidden_size": 4480,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "intermediate_size": 15680,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 80,
    "mamba_num_heads": 128,
    "max_position_embeddings": 131072,
    "n_groups": 8,
    "num_attention_heads": 40,
    "num_hidden_layers": 56,
    "num_key_value_heads": 8,
    "ssm_state_size": 128,
    "time_step_limit": [0.0, float("inf")],
    "vocab_size": 131072,
}
LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "conv_L_cache": 3,
    "conv_bias": False,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "vocab_size": 65536,
}
ERNIE_45 = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "num_attention_heads": 20,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "use_bias": False,
    "vocab_size": 103424,
}
EMBEDDING_GEMMA = {
    "architectures": ["Gemma3TextModel"],
    "model_type": "gemma3_text",
    "_sliding_window_pattern": 6,
    "head_dim": 256,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4,
    "max_position_embeddings": 2048,
    "num_attention_heads": 3,
    "num_hidden_layers": 24,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "use_bidirectional_attention": True,
    "vocab_size": 262144,
}
OLMO_3 = {
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "attention_bias": False,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    "max_position_embeddings": 65536,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 100278,
}
GLM_47_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
HUNYUAN_7B = {
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "model_type": "hunyuan_v1_dense",
    "attention_head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_cla": False,
    "use_qk_norm": True,
    "vocab_size": 128167,
}
HUNYUAN_A13B = HUNYUAN_7B | {
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "model_type": "hunyuan_v1_moe",
    "intermediate_size": 3072,
    "moe_intermediate_size": [3072] * 32,
    "moe_topk": [8] * 32,
    "norm_topk_prob": True,
    "num_experts": 64,
    "num_shared_expert": [1] * 32,
}
MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "head_dim": 128,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
PUBLISHED = {
    "Granite 4.0 H Tiny": GRANITE_4_H,
    "Nemotron Nano 9B v2": NEMOTRON_NANO_2,
    "Llama 1": LLAMA_1,
    "Llama 2": LLAMA_2,
    "Llama 3.1": LLAMA_31,
    "Llama with linear scaling": LLAMA_2 | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "Mistral Nemo": NEMO,
    "Mistral Small 3.1": MISTRAL_SMALL,
    "Qwen 2.5": QWEN_25,
    "Qwen 2.5, stretched": QWEN_25 | {"rope_scaling": YARN},
    "Gemma 2 27B": GEMMA_2,
    "Gemma 3 4B": GEMMA_3,
    "Gemma 3 1B": GEMMA_3_TEXT,
    "EmbeddingGemma": EMBEDDING_GEMMA,
    "OLMo 3 7B": OLMO_3,
    "gpt-oss 20B": GPT_OSS,
    "Phi 3 mini 128k": PHI_3_LONG,
    "LFM2 1.2B": LFM2,
    "ERNIE 4.5 21B": ERNIE_45,
    "GLM-4.7-Flash": GLM_47_FLASH,
    "Hunyuan 7B": HUNYUAN_7B,
    "Hunyuan-A13B": HUNYUAN_A13B,
    "MiniMax M2": MINIMAX_M2,
}


def told(folder: Path, values: dict[str, Any], flavour: str = "llama.cpp") -> dict[str, Any]:
    """The keys of the architecture for these settings."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values))
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    config = Configuration.read(folder)
    table = conversion_for(config)
    config = config.of_family(defaults=table.defaults, spellings=table.spellings)
    if table.check is not None:
        table.check(config)
    fields = metadata_of(table, config, flavour=flavour, recipe="f16", rows=321)
    architecture = fields["general.architecture"].value
    return {
        name.removeprefix(f"{architecture}."): field.value
        for name, field in fields.items()
        if name.startswith(f"{architecture}.")
    }


def today(values: dict[str, Any]) -> PreTrainedConfig:
    """The settings as `transformers` reads them from a copy."""
    return CONFIG_MAPPING[values["model_type"]].from_dict(json.loads(json.dumps(values)))


@pytest.mark.parametrize("flavour", ["llama.cpp", "ollama"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_older_settings_are_read_as_transformers_reads_them(name, flavour, tmp_path) -> None:
    published = PUBLISHED[name]
    expanded = today(published).to_dict() | {"architectures": published["architectures"]}
    assert expanded != published
    older = told(tmp_path / "older", published, flavour)
    assert older == told(tmp_path / "today", expanded, flavour)
    assert older["block_count"] == today(published).get_text_config().num_hidden_layers


def test_settings_that_gemma_checkpoints_omit_have_defaults(tmp_path) -> None:
    keys = told(tmp_path / "gemma", GEMMA_3)
    assert {
        "attention.head_count": 8,
        "attention.head_count_kv": 4,
        "attention.key_length": 256,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 1024,
        "context_length": 131072,
        "rope.freq_base": 1000000.0,
        "rope.freq_base_swa": 10000.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
        "vocab_size": 262208,
    }.items() <= keys.items()
    ollama = told(tmp_path / "ollama", GEMMA_3, "ollama")
    assert ollama["rope.global.freq_base"] == 1000000.0
    assert ollama["rope.local.freq_base"] == 10000.0
    assert "rope.freq_base" not in ollama


def test_both_sides_of_a_window_are_stated_as_one(tmp_path) -> None:
    keys = told(tmp_path / "gemma", EMBEDDING_GEMMA)
    assert keys["attention.sliding_window"] == 512 and keys["attention.causal"] is False
    assert "attention.sliding_window_pattern" not in keys


def test_a_scaling_of_layers_without_a_window_only(tmp_path) -> None:
    keys = told(tmp_path / "olmo", OLMO_3)
    assert keys["rope.freq_base_swa"] == keys["rope.freq_base"] == 500000.0
    assert keys["rope.scaling.attn_factor"] == pytest.approx(1.0)
    ollama = told(tmp_path / "ollama", OLMO_3, "ollama")
    assert ollama["rope.scaling.attn_factor"] == pytest.approx(1 + 0.1 * np.log(8.0))
    yarn = {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 8.0}
    scaled = {"rope_parameters": {"full_attention": yarn, "sliding_attention": yarn}}
    with pytest.raises(UnsupportedModelError, match="layers with a window have the rope scaling"):
        told(tmp_path / "scaled", OLMO_3 | scaled)


@pytest.mark.parametrize("setting", [{"clip_qkv": 8.0}, {"norm_topk_prob": True}])
def test_olmoe_is_refused_with_settings_of_no_published_model(tmp_path, setting) -> None:
    olmoe = {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe"}
    with pytest.raises(UnsupportedModelError, match=f"has `{next(iter(setting))}`"):
        told(tmp_path / "changed", LLAMA_2 | olmoe | setting)


def test_the_base_of_hunyuan_is_stretched(tmp_path) -> None:
    dense, experts = (
        told(tmp_path / name, values)
        for name, values in (("dense", HUNYUAN_7B), ("experts", HUNYUAN_A13B))
    )
    # Of llama.cpp's files of both models.
    expected = {"rope.freq_base": pytest.approx(11158840.0), "context_length": 262144}
    assert {key: dense[key] for key in expected} == expected
    assert {key: experts[key] for key in expected} == expected
    assert (experts["expert_used_count"], experts["expert_feed_forward_length"]) == (8, 3072)
    plain = told(tmp_path / "plain", HUNYUAN_7B | {"rope_scaling": None})
    assert (plain["rope.freq_base"], plain["context_length"]) == (10000.0, 32768)


def test_dense_layers_that_do_not_lead_are_refused(tmp_path) -> None:
    kinds = ["sparse"] * 46 + ["dense"]
    with pytest.raises(ModelFileError, match="are not `dense` first and then `sparse`"):
        told(tmp_path / "folder", GLM_47_FLASH | {"mlp_layer_types": kinds})


def test_a_pattern_of_letters_is_repeated(tmp_path) -> None:
    exaone = {"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4"}
    windows = {"sliding_window": 4096, "sliding_window_pattern": "LLLG"}
    keys = told(tmp_path / "mixed", LLAMA_2 | exaone | windows)
    assert keys["attention.sliding_window_pattern"] == [True, True, True, False] * 8
    assert "attention.sliding_window_pattern" not in told(tmp_path / "full", LLAMA_2 | exaone)


def test_widths_of_lfm2_are_adjusted_and_its_convolutions_have_no_key_heads(tmp_path) -> None:
    keys = told(tmp_path / "lfm2", LFM2)
    assert keys["feed_forward_length"] == 8192
    attending = LFM2["full_attn_idxs"]
    assert keys["attention.head_count_kv"] == [8 if n in attending else 0 for n in range(16)]
    plain = told(tmp_path / "plain", LFM2 | {"block_auto_adjust_ff_dim": False})
    assert plain["feed_forward_length"] == 12288


def test_scaling_parameters_are_kept(tmp_path) -> None:
    qwen = told(tmp_path / "qwen", QWEN_25 | {"rope_scaling": YARN | {"attention_factor": 1.5}})
    assert qwen["rope.scaling.type"] == "yarn" and qwen["rope.scaling.factor"] == 4.0
    assert qwen["rope.scaling.original_context_length"] == 32768
    # Readers multiply it by YaRN's default of 1 + 0.1 ln(factor).
    assert qwen["rope.scaling.attn_factor"] * (1 + 0.1 * np.log(4.0)) == pytest.approx(1.5)
    linear = told(tmp_path / "llama", PUBLISHED["Llama with linear scaling"])
    assert (linear["rope.scaling.type"], linear["rope.scaling.factor"]) == ("linear", 4.0)
    assert "rope.scaling.type" not in told(tmp_path / "plain", LLAMA_2)


@pytest.mark.parametrize(
    "values",
    [GEMMA_2 | {"sliding_window_pattern": 0}, SMOLLM_3 | {"no_rope_layer_interval": "x"}],
)
def test_impossible_intervals_are_refused(values, tmp_path) -> None:
    with pytest.raises(ModelFileError, match="does not determine"):
        told(tmp_path / "folder", values)


@pytest.mark.parametrize("high", [4.0, 1.0])
def test_llama3_factors_match_the_frequencies_of_transformers(high) -> None:
    scaling = LLAMA_31["rope_scaling"] | {"high_freq_factor": high}
    values = LLAMA_31 | {"rope_scaling": scaling}
    config = Configuration(values, path=Path("config.json"))
    [computed] = conversion_for(config).computed
    factors = computed.make(config)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](today(values), torch.device("cpu"))
    plain = 500000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float32) / 128)
    assert torch.allclose(plain / factors, scaled, rtol=1e-5)
    assert factors.max() == 8 and factors.min() == 1


@pytest.mark.parametrize(
    "values, said",
    [
        (LLAMA_2 | {"rope_scaling": {"type": "dynamic"}}, "the rope scaling dynamic is not"),
        (QWEN_25 | {"use_sliding_window": True}, "has layers with a sliding window"),
        (QWEN_25 | {"layer_types": ["sliding_attention"] * 28}, "has layers with a sliding window"),
        (GEMMA_2 | {"query_pre_attn_scalar": 128}, "is 128, where files .* mean 144"),
        (GEMMA_3_TEXT | {"query_pre_attn_scalar": 168}, "is 168, where files .* mean 256"),
        (GEMMA_2 | {"layer_types": ["full_attention"] * 46}, "in all layers but one in 2"),
        (SMOLLM_3 | {"no_rope_layer_interval": 2}, "one layer in 2 has no rotation"),
        (ERNIE_45 | {"moe_layer_end_index": 26}, "layers after .* have no experts"),
        (MINIMAX_M2 | {"scoring_func": "softmax"}, "has 'softmax' as `scoring_func`, where"),
        (HUNYUAN_7B | {"rope_scaling": {"type": "dynamic"}}, "needs an `alpha`"),
        (GLM_47_FLASH | {"rope_interleave": False}, "has False as `rope_interleave`"),
        (HUNYUAN_A13B | {"num_shared_expert": [2] * 32}, "has 2 shared experts in a layer"),
    ],
)
def test_settings_that_files_cannot_express_are_refused(values, said, tmp_path) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        told(tmp_path / "folder", values)
