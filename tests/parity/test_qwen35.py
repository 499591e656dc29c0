"""Logits of the text models of Qwen 3.5 against `transformers`, on tiny random models."""

from collections.abc import Iterator

import pytest
from transformers import (
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from model_zoo.gguf.reader import GGUFFile
from tests.parity.agreement import (
    CHECKS,
    QUANTIZED_TYPES,
    Pair,
    check_quantized,
    check_whole_prompt,
    load_decoder,
    make_pair,
)
from tests.parity.delta_rule import EPS, step_by_step
from tests.tiny_models import tiny_tokenizer, write_tiny

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "max_position_embeddings": 512,
    "rms_norm_eps": EPS,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
EXPERTS = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}


def dense(**changes) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(**({"intermediate_size": 96} | SIZES | changes))


def experts(**changes) -> Qwen3_5MoeTextConfig:
    return Qwen3_5MoeTextConfig(**(EXPERTS | SIZES | changes))


CONFIGS = {
    "dense": dense(),
    "a_state_last": dense(num_hidden_layers=3, full_attention_interval=2),
    "one_value_head_for_each_key_head": dense(linear_num_key_heads=6),
    "tied": dense(tie_word_embeddings=True),
    "experts": experts(),
    "experts_in_wide_rows": experts(linear_value_head_dim=80, num_experts_per_tok=8),
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
LARGE = {"hidden_size": 256, "head_dim": 64, "linear_key_head_dim": 64}
LARGE |= {"linear_value_head_dim": 128}
LARGE_MODELS = {
    "dense": dense(intermediate_size=512, **LARGE),
    "experts": experts(moe_intermediate_size=256, shared_expert_intermediate_size=256, **LARGE),
}


@pytest.fixture(scope="module", autouse=True)
def steps() -> Iterator[None]:
    with step_by_step(modeling_qwen3_5, modeling_qwen3_5_moe):
        yield


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(pair, check) -> None:
    CHECKS[check](pair)


@pytest.mark.parametrize("model", LARGE_MODELS)
@pytest.mark.parametrize("type", QUANTIZED_TYPES)
def test_quantized_copies_agree(tmp_path, model, type) -> None:
    check_quantized(LARGE_MODELS[model], tmp_path, type)


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_models_that_see_have_a_text_part_like_the_others(tmp_path, model) -> None:
    whole = Qwen3_5Config if model == "dense" else Qwen3_5MoeConfig
    config = whole(text_config=CONFIGS[model].to_dict(), vision_config=VISION)
    pair = make_pair(config, tmp_path / "tiny.gguf")
    for check in ("whole_prompt", "prompt_and_decoding"):
        CHECKS[check](pair)


@pytest.mark.parametrize("config", [dense(), experts()], ids=["dense", "experts"])
def test_files_as_ollama_writes_them_mean_the_same(tmp_path, config) -> None:
    """Key heads counted for each layer, none where it does not attend, and other names."""
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config, flavour="ollama")
    file = GGUFFile.open(path)
    heads = file.metadata[f"{file.metadata['general.architecture']}.attention.head_count_kv"]
    assert list(heads) == [0, 0, 0, 2] and "blk.0.ssm_dt" in file.tensors
    check_whole_prompt(Pair(load_decoder(path), twin, tiny_tokenizer().get_vocab_size()))
