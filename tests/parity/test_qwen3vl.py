"""Logits of Qwen3-VL's text models against `transformers`, on tiny random models."""

import pytest
from transformers import Qwen3VLConfig, Qwen3VLMoeConfig

from tests.parity.agreement import CHECKS, QUANTIZED_TYPES, Pair, check_quantized, make_pair

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2, "patch_size": 4,
    "num_position_embeddings": 4, "deepstack_visual_indexes": [0],
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def config(kind=Qwen3VLConfig, sections: tuple[int, ...] = (3, 3, 2), **changes):
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": list(sections)}
    text = SIZES | changes | {"rope_parameters": rope}
    vision = VISION | {"out_hidden_size": text["hidden_size"]}
    tied = text["tie_word_embeddings"]
    return kind(text_config=text, vision_config=vision, tie_word_embeddings=tied)


CONFIGS = {
    "plain": config(),
    "tied": config(tie_word_embeddings=True),
    "experts": config(Qwen3VLMoeConfig, **EXPERTS),
}
LARGE = config(hidden_size=256, head_dim=64, intermediate_size=256, sections=(12, 10, 10))


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(pair, check) -> None:
    CHECKS[check](pair)


@pytest.mark.parametrize("type", QUANTIZED_TYPES)
def test_quantized_copies_agree(tmp_path, type) -> None:
    check_quantized(LARGE, tmp_path, type)
