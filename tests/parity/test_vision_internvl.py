"""InternVL with images against `transformers`, on tiny random models: from pictures to logits."""

import pytest
import torch
from torch import Tensor
from transformers import InternVLConfig

from model_zoo.chat_model import Prompt
from model_zoo.models.internvl.placeholders import PLACE, InternVLPlaceholders
from tests.parity.vision_agreement import (
    CHECKS,
    Seeing,
    make_seeing,
    shown_in_order,
    special_ids,
)

SPECIAL = InternVLPlaceholders.reserved
SIDE = 36
TEXT = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TEXTS = {
    "llama": {"model_type": "llama", **TEXT},
    "qwen2": {"model_type": "qwen2", **TEXT},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, **TEXT},
    "qwen3moe": {"model_type": "qwen3_moe", "head_dim": 16, **TEXT, **EXPERTS},
}


def config(text: str = "qwen2") -> InternVLConfig:
    vision = {
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": [SIDE, SIDE], "patch_size": [6, 6],
    }  # fmt: skip
    place = special_ids(SPECIAL)[PLACE]
    return InternVLConfig(text_config=TEXTS[text], vision_config=vision, image_token_id=place)


def expected(twin, prompt: Prompt) -> Tensor:
    """[tokens, vocabulary]"""
    tiles = [image.pixels for image in shown_in_order(prompt)]
    shown = {"pixel_values": torch.cat(tiles)} if tiles else {}
    return twin(input_ids=torch.tensor([prompt.tokens]), **shown).logits[0]


@pytest.fixture(scope="module", params=TEXTS)
def seeing(request, tmp_path_factory) -> Seeing:
    return make_seeing(
        config(request.param),
        tmp_path_factory.mktemp("models"),
        expected,
        special=SPECIAL,
        spelled=PLACE + "\n",
        flavour="llama.cpp",
        settings={"size": {"height": SIDE, "width": SIDE}, "max_patches": 6},
    )


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(seeing, check) -> None:
    CHECKS[check](seeing)


def test_the_images_of_these_checks_are_several_tiles_and_no_squares(seeing) -> None:
    grids = [image.grid for image in seeing.prompt("two images in one message").images]
    assert grids == [(1, 2), (2, 1)]
