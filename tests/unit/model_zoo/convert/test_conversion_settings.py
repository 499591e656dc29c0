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
from model_zoo.convert.convert_folder import conversion_for, vision_of
from model_zoo.convert.gguf_metadata import metadata_of, table_keys
from model_zoo.convert.tables import tables_by_model_type
from runtime.errors import ModelFileError, UnsupportedModelError
from tests.tiny_models import tiny_tokenizer
from tests.unit.model_zoo.convert.published_settings import (
    COMMAND_R,
    DBRX,
    EMBEDDING_GEMMA,
    ERNIE_45,
    GEMMA_2,
    GEMMA_3,
    GEMMA_3_TEXT,
    GLM_47_FLASH,
    GTE_RERANKER,
    HUNYUAN_7B,
    HUNYUAN_A13B,
    HUNYUAN_OCR,
    LFM2,
    LLAMA_2,
    LLAMA_31,
    LLAVA_15,
    MINIMAX_M2,
    NEMOTRON_NANO_2,
    OLMO_3,
    PUBLISHED,
    QWEN_25,
    SMOLLM_3,
    STARCODER,
    YARN,
)

NOMIC_2 = {"architectures": ["NomicBertModel"], "model_type": "nomic_bert"}


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


TEXT_PARTS = [(k, table) for k, table in tables_by_model_type().items() if table.nested]


@pytest.mark.parametrize("kind, table", TEXT_PARTS, ids=[kind for kind, _ in TEXT_PARTS])
def test_settings_that_text_parts_omit_have_the_defaults_of_transformers(
    kind, table, tmp_path
) -> None:
    usual = CONFIG_MAPPING[kind]().to_dict()
    assert table.nested[kind].items() <= usual.items()
    part, whole = {"model_type": kind}, LLAVA_15 | {"vocab_size": None}
    omitted = told(tmp_path / "omitted", whole | {"text_config": part})
    assert omitted == told(tmp_path / "stated", whole | {"text_config": usual | part})
    with pytest.raises(ModelFileError, match="has no `"):
        told(tmp_path / "alone", {"architectures": list(table.serves)} | part)


def test_a_projector_has_the_width_of_a_text_model_that_omits_it(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAVA_15))
    config = Configuration.read(tmp_path)
    config = config.of_family(defaults=conversion_for(config).defaults, spellings={})
    vision, part = vision_of(config)
    assert vision is not None
    part = part.of_family(defaults=vision.defaults, spellings={})
    assert table_keys(vision, part, flavour="llama.cpp")["clip.vision.projection_dim"] == 4096


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


def test_the_context_of_command_r_is_the_trained_one(tmp_path) -> None:
    assert told(tmp_path / "command-r", COMMAND_R)["context_length"] == 131072
    others = {key: value for key, value in COMMAND_R.items() if key != "model_max_length"}
    assert told(tmp_path / "aya", others)["context_length"] == 8192


def test_starcoder_may_approximate_its_activation(tmp_path) -> None:
    """As by default of `transformers`; files do not state it."""
    usual = {key: value for key, value in STARCODER.items() if key != "activation_function"}
    stated = usual | {"activation_function": "gelu_pytorch_tanh"}
    expected = told(tmp_path / "exact", STARCODER)
    assert told(tmp_path / "usual", usual) == told(tmp_path / "stated", stated) == expected


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


@pytest.mark.parametrize(
    "setting", [{"moe_normalize_expert_weights": None}, {"ffn_act_fn": {"name": "gelu"}}]
)
def test_dbrx_is_refused_with_experts_of_no_published_model(tmp_path, setting) -> None:
    with pytest.raises(UnsupportedModelError, match="files of this architecture mean these"):
        told(tmp_path / "changed", DBRX | {"ffn_config": DBRX["ffn_config"] | setting})


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


def test_the_base_of_hunyuan_ocr_is_stated_with_its_stretch(tmp_path) -> None:
    keys = told(tmp_path / "ocr", HUNYUAN_OCR)
    assert keys["rope.freq_base"] == 10000.0 and keys["rope.scaling.alpha"] == 1000.0
    assert list(keys["rope.dimension_sections"]) == [16, 16, 16, 16]
    assert keys["context_length"] == 32768


@pytest.mark.parametrize("layers", [55, 57])
def test_a_pattern_for_another_number_of_layers_is_refused(tmp_path, layers) -> None:
    with pytest.raises(ModelFileError, match=f"states {layers} layers, and the kinds of 56"):
        told(tmp_path / "folder", NEMOTRON_NANO_2 | {"num_hidden_layers": layers})


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
        (
            HUNYUAN_OCR
            | {"rope_scaling": HUNYUAN_OCR["rope_scaling"] | {"xdrope_section": [32] * 2}},
            "rotates by the sections \\[32, 32\\]",
        ),
        (GTE_RERANKER | {"hidden_activation": "relu"}, "`hidden_activation` is relu; gelu and"),
        (GTE_RERANKER | {"id2label": {"0": "a", "1": "b"}}, "classifies texts by 2 labels"),
        (STARCODER | {"activation_function": "relu"}, "has 'relu' as `activation_function`"),
        (NOMIC_2 | {"moe_every_n_layers": 2}, "has experts with a bias"),
    ],
)
def test_settings_that_files_cannot_express_are_refused(values, said, tmp_path) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        told(tmp_path / "folder", values)
