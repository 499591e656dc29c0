"""The rows of the ERNIE models and PaddleOCR-VL in the table of text families."""

from collections.abc import Mapping
from typing import Any

from transformers import Ernie4_5_MoeConfig, Ernie4_5Config, PaddleOCRVLConfig

from tests.families.text_family import SIZES, WIDE, WIDE_HEADS, CompleteFile, TextFamily, rope

EXPERTS = {
    "num_hidden_layers": 4,
    "moe_intermediate_size": 32,
    "moe_num_experts": 8,
    "moe_num_shared_experts": 2,
    "moe_k": 3,
}
PADDLE_ROPE = rope(5e5, mrope_section=[4, 6, 6])
PADDLE = SIZES | PADDLE_ROPE | {"head_dim": 32}
PADDLE_VISION = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "image_size": 56,
}


def paddleocr(text: Mapping[str, Any] = PADDLE, **vision: Any) -> PaddleOCRVLConfig:
    tied = text.get("tie_word_embeddings", True)
    return PaddleOCRVLConfig(
        text_config=dict(text), vision_config=PADDLE_VISION | vision, tie_word_embeddings=tied
    )


def paddleocr_text(**text: Any) -> PaddleOCRVLConfig:
    return paddleocr(text)


FAMILIES: Mapping[str, TextFamily] = {
    "ernie4_5": TextFamily(
        Ernie4_5Config,
        SIZES | rope(5e5) | {"head_dim": 32},
        {"plain": {}, "biases_and_own_head": {"use_bias": True, "tie_word_embeddings": False}},
        wide=WIDE_HEADS,
        divided="biases_and_own_head",
    ),
    "ernie4_5-moe": TextFamily(
        Ernie4_5_MoeConfig,
        SIZES | rope(5e5) | EXPERTS,
        {
            "plain": {},
            "every_other_layer_without_shared_expert": {
                "moe_layer_start_index": 2,
                "moe_layer_interval": 2,
                "moe_num_shared_experts": 0,
            },
        },
        wide=WIDE | {"moe_intermediate_size": 256},
        files=(
            CompleteFile(
                optional_keys="""
                    attention.key_length attention.value_length interleave_moe_layer_step
                    expert_feed_forward_length expert_shared_count
                    expert_shared_feed_forward_length
                """
            ),
        ),
    ),
    "paddleocr": TextFamily(
        paddleocr_text,
        PADDLE,
        {
            "plain": {},
            "biases_and_own_head": rope(1e4, mrope_section=[6, 5, 5])
            | {"use_bias": True, "tie_word_embeddings": False},
        },
        wide=WIDE_HEADS | rope(5e5, mrope_section=[8, 12, 12]),
        divided="biases_and_own_head",
        files=(CompleteFile(optional_keys="rope.freq_base"),),
    ),
}
