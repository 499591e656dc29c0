"""Mistral 3 with images against `transformers`, on tiny random models: from pictures to logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Mistral3Config, MistralConfig, PixtralVisionConfig

from model_zoo.chat_model import Prompt
from model_zoo.models.mistral3.placeholders import BREAK, END, PLACE
from tests.parity.vision_agreement import (
    CHECKS,
    FLAVOURS,
    Seeing,
    make_seeing,
    shown_in_order,
    special_ids,
)

SPECIAL = (PLACE, BREAK, END)


def config() -> Mistral3Config:
    text = MistralConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, intermediate_size=96, max_position_embeddings=512, sliding_window=None,
    )  # fmt: skip
    vision = PixtralVisionConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=3,
        image_size=60, patch_size=6, hidden_act="silu",
    )  # fmt: skip
    return Mistral3Config(
        text_config=text,
        vision_config=vision,
        spatial_merge_size=2,
        image_token_id=special_ids(SPECIAL)[PLACE],
    )


def expected(twin, prompt: Prompt) -> Tensor:
    """[tokens, vocabulary]"""
    ids = torch.tensor([prompt.tokens])
    images = [image.pixels for image in shown_in_order(prompt)]
    if not images:
        return twin(input_ids=ids).logits[0]
    sizes = torch.tensor([pixels.shape[1:] for pixels in images])
    high, wide = sizes.amax(0).tolist()
    padded = [F.pad(p, (0, wide - p.shape[2], 0, high - p.shape[1])) for p in images]
    return twin(input_ids=ids, pixel_values=torch.stack(padded), image_sizes=sizes).logits[0]


@pytest.fixture(scope="module", params=FLAVOURS)
def seeing(request, tmp_path_factory) -> Seeing:
    return make_seeing(
        config(),
        tmp_path_factory.mktemp("models"),
        expected,
        special=SPECIAL,
        spelled=PLACE,
        flavour=request.param,
    )


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(seeing, check) -> None:
    CHECKS[check](seeing)
