"""Idefics 3 and SmolVLM with images against `transformers`: from pictures to logits."""

import pytest
import torch
from torch import Tensor
from transformers import Idefics3Config, PreTrainedConfig, SmolVLMConfig

from model_zoo.chat_model import Prompt
from model_zoo.models.idefics3.placeholders import PLACE, Idefics3Placeholders
from tests.parity.vision_agreement import (
    CHECKS,
    Seeing,
    make_seeing,
    shown_in_order,
    special_ids,
)

SPECIAL = Idefics3Placeholders.reserved
SIDE = 36
SETTINGS = {"size": {"longest_edge": 3 * SIDE}, "max_image_size": {"longest_edge": SIDE}}


def config(kind: type[PreTrainedConfig] = SmolVLMConfig) -> PreTrainedConfig:
    text = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
        "max_position_embeddings": 512,
    }  # fmt: skip
    vision = {
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": SIDE, "patch_size": 6,
    }  # fmt: skip
    place = special_ids(SPECIAL)[PLACE]
    return kind(text_config=text, vision_config=vision, scale_factor=3, image_token_id=place)


def expected(twin, prompt: Prompt) -> Tensor:
    """[tokens, vocabulary]"""
    tiles = [image.pixels for image in shown_in_order(prompt)]
    shown = {"pixel_values": torch.cat(tiles).unsqueeze(0)} if tiles else {}
    return twin(input_ids=torch.tensor([prompt.tokens]), **shown).logits[0]


@pytest.fixture(scope="module", params=[Idefics3Config, SmolVLMConfig])
def seeing(request, tmp_path_factory) -> Seeing:
    return make_seeing(
        config(request.param),
        tmp_path_factory.mktemp("models"),
        expected,
        special=SPECIAL,
        spelled=PLACE,
        flavour="llama.cpp",
        settings=SETTINGS,
    )


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(seeing, check) -> None:
    CHECKS[check](seeing)


def test_the_images_of_these_checks_are_several_tiles_and_no_squares(seeing) -> None:
    grids = [image.grid for image in seeing.prompt("two images in one message").images]
    assert grids == [(2, 3), (3, 2)]
