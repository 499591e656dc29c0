"""LLaVA 1.6 with images against `transformers`, on tiny random models: from pictures to logits."""

import pytest
import torch
from torch import Tensor
from transformers import CLIPVisionConfig, LlavaNextConfig

from model_zoo.chat_model import Prompt
from model_zoo.models.llava.placeholders import PLACE, LlavaPlaceholders
from tests.parity.test_vision_llava import TEXT, TEXTS
from tests.parity.vision_agreement import (
    CHECKS,
    Seeing,
    make_seeing,
    shown_in_order,
    special_ids,
)

SPECIAL = LlavaPlaceholders.reserved
SIDE = 36
SETTINGS = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}


def config(text: str = "mistral") -> LlavaNextConfig:
    vision = CLIPVisionConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
        image_size=SIDE, patch_size=9,
    )  # fmt: skip
    return LlavaNextConfig(
        text_config=TEXTS[text](**TEXT),
        vision_config=vision,
        image_grid_pinpoints=[[36, 72], [72, 36], [72, 72], [108, 36], [36, 108]],
        image_token_index=special_ids(SPECIAL)[PLACE],
    )


def expected(twin, prompt: Prompt) -> Tensor:
    """[tokens, vocabulary]"""
    ids = torch.tensor([prompt.tokens])
    images = shown_in_order(prompt)
    if not images:
        return twin(input_ids=ids).logits[0]
    sizes = torch.tensor([image.grid for image in images])
    most = max(len(image.pixels) for image in images)
    padded = [
        torch.cat([i.pixels, i.pixels.new_zeros(most - len(i.pixels), 3, SIDE, SIDE)])
        for i in images
    ]
    return twin(input_ids=ids, pixel_values=torch.stack(padded), image_sizes=sizes).logits[0]


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2"])
def seeing(request, tmp_path_factory) -> Seeing:
    return make_seeing(
        config(request.param),
        tmp_path_factory.mktemp("models"),
        expected,
        special=SPECIAL,
        spelled=PLACE + "\n",
        flavour="llama.cpp",
        settings=SETTINGS,
    )


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(seeing, check) -> None:
    CHECKS[check](seeing)


def test_the_images_of_these_checks_are_several_tiles_and_their_padding_is_left_out(seeing) -> None:
    images = seeing.prompt("two images in one message").images
    # 16 rows of the whole; of three tiles in a line or a column, with 12 rows along them, those
    # with the image, and the ends of its lines.
    assert [(len(image.pixels), image.rows) for image in images] == [
        (1 + 3, 16 + 4 * (8 + 1)),
        (1 + 3, 16 + 8 * (4 + 1)),
    ]
    assert [image.grid for image in images] == [(60, 130), (150, 70)]
