"""LLaVA 1.5 with images against `transformers`, on tiny random models: from pictures to logits."""

import pytest
import torch
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
)

from model_zoo.chat_model import Prompt
from model_zoo.models.llava.placeholders import PLACE, LlavaPlaceholders
from tests.parity.vision_agreement import (
    CHECKS,
    Seeing,
    make_seeing,
    shown_in_order,
    special_ids,
)

SPECIAL = LlavaPlaceholders.reserved
TEXT = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 512,
}  # fmt: skip
TEXTS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "phi3": Phi3Config,
    "qwen2": Qwen2Config,
}
# What their processors do to images, as the checkpoints state it.
SETTINGS = {
    "middle": {"size": {"shortest_edge": 36}, "crop_size": {"height": 36, "width": 36}},
    "padded": {"size": {"shortest_edge": 36}, "do_pad": True},
}


def config(text: str = "llama") -> LlavaConfig:
    vision = CLIPVisionConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
        image_size=36, patch_size=6,
    )  # fmt: skip
    more = {"pad_token_id": 0} if text == "phi3" else {}
    return LlavaConfig(
        text_config=TEXTS[text](**TEXT, **more),
        vision_config=vision,
        image_token_index=special_ids(SPECIAL)[PLACE],
    )


def expected(twin, prompt: Prompt) -> Tensor:
    """[tokens, vocabulary]"""
    pixels = [image.pixels for image in shown_in_order(prompt)]
    shown = {"pixel_values": torch.stack(pixels)} if pixels else {}
    return twin(input_ids=torch.tensor([prompt.tokens]), **shown).logits[0]


@pytest.fixture(
    scope="module",
    params=[(text, "middle") for text in TEXTS] + [("llama", "padded")],
    ids="-".join,
)
def seeing(request, tmp_path_factory) -> Seeing:
    text, settings = request.param
    return make_seeing(
        config(text),
        tmp_path_factory.mktemp("models"),
        expected,
        special=SPECIAL,
        spelled=PLACE + "\n",
        flavour="llama.cpp",
        settings=SETTINGS[settings],
    )


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(seeing, check) -> None:
    CHECKS[check](seeing)
