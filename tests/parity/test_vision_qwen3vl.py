"""Qwen3-VL with images against `transformers`, on tiny random models: from pictures to logits."""

import pytest
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLMoeConfig

from model_zoo.chat_model import Prompt
from model_zoo.multimodal.qwen_placeholders import END, PLACE, START
from tests.parity.vision_agreement import (
    CHECKS,
    FLAVOURS,
    Seeing,
    make_seeing,
    rectangles,
    special_ids,
)

SPECIAL = (START, PLACE, END, "<|video_pad|>")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def config(kind, **changes):
    ids = special_ids(SPECIAL)
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [3, 3, 2]}
    text = {
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
        "max_position_embeddings": 512, "rope_parameters": rope, "tie_word_embeddings": False,
    }  # fmt: skip
    vision = {
        "hidden_size": 48, "intermediate_size": 80, "depth": 4, "num_heads": 3, "patch_size": 16,
        "num_position_embeddings": 49, "out_hidden_size": 64, "deepstack_visual_indexes": [0, 2],
    }  # fmt: skip
    return kind(
        text_config=text | changes,
        vision_config=vision,
        image_token_id=ids[PLACE],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids[START],
        vision_end_token_id=ids[END],
    )


CONFIGS = {
    "dense": config(Qwen3VLConfig),
    "experts": config(Qwen3VLMoeConfig, **EXPERTS),
}


def expected(twin, prompt: Prompt) -> Tensor:
    """[tokens, vocabulary]"""
    return twin(**rectangles(prompt, twin.config.image_token_id, merge=2)).logits[0]


@pytest.fixture(scope="module", params=[(c, f) for c in CONFIGS for f in FLAVOURS], ids=str)
def seeing(request, tmp_path_factory) -> Seeing:
    name, flavour = request.param
    return make_seeing(
        CONFIGS[name],
        tmp_path_factory.mktemp("models"),
        expected,
        special=SPECIAL,
        spelled=START + PLACE + END,
        flavour=flavour,
        settings={"size": {"shortest_edge": 32 * 32 * 2, "longest_edge": 32 * 32 * 30}},
    )


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(seeing, check) -> None:
    CHECKS[check](seeing)
