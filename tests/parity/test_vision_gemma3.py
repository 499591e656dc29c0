"""Gemma 3 with images against `transformers`, on tiny random models: from pictures to logits."""

import pytest
import torch
from torch import Tensor
from transformers import Gemma3Config, Gemma3TextConfig, SiglipVisionConfig

from model_zoo.chat_model import Prompt
from model_zoo.models.gemma3.placeholders import END, PLACE, START
from tests.parity.vision_agreement import (
    CHECKS,
    FLAVOURS,
    Seeing,
    make_seeing,
    shown_in_order,
    special_ids,
)

SPECIAL = (START, PLACE, END)


def config(rows: int = 9, window: int = 32) -> Gemma3Config:
    text = Gemma3TextConfig(
        hidden_size=64, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=96, query_pre_attn_scalar=16, sliding_window=window,
        max_position_embeddings=512,
    )  # fmt: skip
    vision = SiglipVisionConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        image_size=84, patch_size=14,
    )  # fmt: skip
    ids = special_ids(SPECIAL)
    return Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=rows,
        image_token_index=ids[PLACE],
        image_token_id=ids[PLACE],
        boi_token_index=ids[START],
        eoi_token_index=ids[END],
    )


CONFIGS = {
    "plain": config(),
    "images_larger_than_the_window": config(rows=36, window=12),
}


def expected(twin, prompt: Prompt) -> Tensor:
    """[tokens, vocabulary]"""
    ids = torch.tensor([prompt.tokens])
    images = shown_in_order(prompt)
    pixels = torch.stack([image.pixels for image in images]) if images else None
    kinds = (ids == twin.config.image_token_id).long()
    return twin(input_ids=ids, pixel_values=pixels, token_type_ids=kinds).logits[0]


@pytest.fixture(scope="module", params=[(c, f) for c in CONFIGS for f in FLAVOURS], ids=str)
def seeing(request, tmp_path_factory) -> Seeing:
    name, flavour = request.param
    return make_seeing(
        CONFIGS[name],
        tmp_path_factory.mktemp("models"),
        expected,
        special=SPECIAL,
        spelled=START,
        flavour=flavour,
    )


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(seeing, check) -> None:
    CHECKS[check](seeing)
