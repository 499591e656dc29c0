"""Gemma 4 with images against `transformers`, on tiny random models: from pictures to logits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Gemma4Config, Gemma4TextConfig, Gemma4VisionConfig

from model_zoo.chat_model import Prompt
from model_zoo.models.gemma4.placeholders import END, PLACE, START, Gemma4Placeholders
from tests.parity.gemma4_patches import as_patches
from tests.parity.test_gemma4 import EXPERTS, KEYS_AS_VALUES, SHARED, SIZES, TURNS
from tests.parity.vision_agreement import (
    CHECKS,
    FLAVOURS,
    Seeing,
    make_seeing,
    shown_in_order,
    special_ids,
)
from tests.tiny_models import tiny_tokenizer

SPECIAL = Gemma4Placeholders.reserved
PATCH, POOLED, ROWS = 4, 3, 12
SETTINGS = {"max_soft_tokens": ROWS, "patch_size": PATCH, "pooling_kernel_size": POOLED}
LARGE = {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}
SMALL = {
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": tiny_tokenizer().get_vocab_size() + len(SPECIAL),
}


def config(**changes: Any) -> Gemma4Config:
    ids = special_ids(SPECIAL)
    vision = Gemma4VisionConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=3, head_dim=16, patch_size=PATCH, pooling_kernel_size=POOLED,
        position_embedding_size=40,
    )  # fmt: skip
    return Gemma4Config(
        text_config=Gemma4TextConfig(**(SIZES | {"rope_parameters": TURNS} | LARGE | changes)),
        vision_config=vision,
        image_token_id=ids[PLACE],
        boi_token_id=ids[START],
        eoi_token_id=ids[END],
        video_token_id=ids["<|video|>"],
        audio_token_id=ids["<|audio|>"],
    )


CONFIGS = {
    "large": config(**KEYS_AS_VALUES),
    "images_larger_than_the_window": config(sliding_window=5, **KEYS_AS_VALUES),
    "with_experts": config(**EXPERTS, **KEYS_AS_VALUES),
    "small": config(**SMALL, **SHARED, use_bidirectional_attention=None),
}


def expected(twin, prompt: Prompt) -> Tensor:
    """[tokens, vocabulary]"""
    ids = torch.tensor([prompt.tokens])
    images = shown_in_order(prompt)
    kinds = (ids == twin.config.image_token_id).long()
    if not images:
        return twin(input_ids=ids, mm_token_type_ids=kinds).logits[0]
    shown = [as_patches(image.pixels[None], PATCH) for image in images]
    most = max(len(places) for _, places in shown)
    padded = [
        (
            F.pad(patches[0], (0, 0, 0, most - len(p))),
            F.pad(p, (0, 0, 0, most - len(p)), value=-1),
        )
        for patches, p in shown
    ]
    pixels, places = (torch.stack(parts) for parts in zip(*padded, strict=True))
    more = {"pixel_values": pixels, "image_position_ids": places, "mm_token_type_ids": kinds}
    return twin(input_ids=ids, **more).logits[0]


@pytest.fixture(scope="module", params=[(c, f) for c in CONFIGS for f in FLAVOURS], ids=str)
def seeing(request, tmp_path_factory) -> Seeing:
    name, flavour = request.param
    return make_seeing(
        CONFIGS[name],
        tmp_path_factory.mktemp("models"),
        expected,
        special=SPECIAL,
        spelled=PLACE,
        flavour=flavour,
        settings=SETTINGS,
    )


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(seeing, check) -> None:
    CHECKS[check](seeing)


def test_the_images_of_these_checks_are_no_squares_and_fill_their_budget(seeing) -> None:
    grids = [image.grid for image in seeing.prompt("two images in one message").images]
    assert grids == [(2, 5), (5, 2)]
