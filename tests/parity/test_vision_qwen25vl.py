"""Qwen2.5-VL with images against `transformers`, on tiny random models: from pictures to logits."""

import pytest
from torch import Tensor
from transformers import Qwen2_5_VLConfig

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


def config() -> Qwen2_5_VLConfig:
    ids = special_ids(SPECIAL)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    text = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 512,
        "rope_parameters": rope,
    }  # fmt: skip
    vision = {
        "hidden_size": 48, "intermediate_size": 80, "depth": 4, "num_heads": 3, "patch_size": 14,
        "window_size": 112, "fullatt_block_indexes": [1, 3], "out_hidden_size": 64,
    }  # fmt: skip
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids[PLACE],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids[START],
        vision_end_token_id=ids[END],
    )


def expected(twin, prompt: Prompt) -> Tensor:
    """[tokens, vocabulary]"""
    return twin(**rectangles(prompt, twin.config.image_token_id, merge=2)).logits[0]


@pytest.fixture(scope="module", params=FLAVOURS)
def seeing(request, tmp_path_factory) -> Seeing:
    return make_seeing(
        config(),
        tmp_path_factory.mktemp("models"),
        expected,
        special=SPECIAL,
        spelled=START + PLACE + END,
        flavour=request.param,
        settings={"min_pixels": 28 * 28 * 2, "max_pixels": 28 * 28 * 30},
    )


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(seeing, check) -> None:
    CHECKS[check](seeing)
