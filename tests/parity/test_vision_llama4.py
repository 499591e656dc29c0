"""Llama 4 with images against `transformers`, on tiny random models: from pictures to logits."""

import pytest
import torch
from torch import Tensor
from transformers import Llama4Config

from model_zoo.chat_model import Prompt
from model_zoo.models.llama4.placeholders import PLACE, WHOLE, Llama4Placeholders
from tests.parity.vision_agreement import (
    CHECKS,
    FLAVOURS,
    Seeing,
    make_seeing,
    shown_in_order,
    special_ids,
)

SPECIAL = Llama4Placeholders.reserved


def config() -> Llama4Config:
    text = {
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "intermediate_size": 32, "intermediate_size_mlp": 96,
        "num_local_experts": 2, "max_position_embeddings": 512, "attention_chunk_size": 64,
    }  # fmt: skip
    vision = {
        "hidden_size": 48, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 3, "image_size": 36, "patch_size": 6, "pixel_shuffle_ratio": 0.5,
        "projector_input_dim": 40, "projector_output_dim": 40, "vision_output_dim": 40,
    }  # fmt: skip
    return Llama4Config(
        text_config=text, vision_config=vision, image_token_index=special_ids(SPECIAL)[PLACE]
    )


def expected(twin, prompt: Prompt) -> Tensor:
    """[tokens, vocabulary]"""
    ids = torch.tensor([prompt.tokens])
    tiles = [image.pixels for image in shown_in_order(prompt)]
    pixels = torch.cat(tiles) if tiles else None
    return twin(input_ids=ids, pixel_values=pixels).logits[0]


@pytest.fixture(scope="module", params=FLAVOURS)
def seeing(request, tmp_path_factory) -> Seeing:
    return make_seeing(
        config(),
        tmp_path_factory.mktemp("models"),
        expected,
        special=SPECIAL,
        spelled=WHOLE,
        flavour=request.param,
    )


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(seeing, check) -> None:
    CHECKS[check](seeing)
