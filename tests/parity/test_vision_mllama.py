"""Llama 3.2 Vision against `transformers`, on tiny random models: from pictures to logits."""

import pytest
import torch
from torch import Tensor
from transformers import MllamaConfig
from transformers.models.mllama.modeling_mllama import MllamaVisionEncoder
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from model_zoo.chat.messages import ImagePart, Message
from model_zoo.chat_model import Prompt
from model_zoo.models.mllama.image_processor import aspect_ratio_id, tile_mask
from model_zoo.models.mllama.placeholders import PLACE
from runtime.errors import RequestError
from tests.parity.test_towers_mllama import states_before_layers
from tests.parity.vision_agreement import (
    CHECKS,
    Seeing,
    make_seeing,
    shown_in_order,
    special_ids,
)
from tests.vision_prompts import png

SPECIAL = (PLACE,)
TILES = 4


def config() -> MllamaConfig:
    text = {
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "cross_attention_layers": [1, 3],
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    vision = {
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "attention_heads": 3,
        "num_global_layers": 2, "image_size": 36, "patch_size": 6,
        "intermediate_layers_indices": [0, 2], "vision_output_dim": 144,
    }  # fmt: skip
    place = special_ids(SPECIAL)[PLACE]
    return MllamaConfig(text_config=text, vision_config=vision, image_token_index=place)


def expected(twin, prompt: Prompt) -> Tensor:
    """[tokens, vocabulary]"""
    ids = torch.tensor([prompt.tokens])
    images = shown_in_order(prompt)
    if not images:
        return twin(input_ids=ids).logits[0]
    sparse = get_cross_attention_token_mask(list(prompt.tokens), special_ids(SPECIAL)[PLACE])
    tiles = [image.grid[0] * image.grid[1] for image in images]
    seen = convert_sparse_cross_attention_mask_to_dense([sparse], [tiles], TILES, ids.shape[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MllamaVisionEncoder, "forward", states_before_layers)
        return twin(
            input_ids=ids,
            pixel_values=torch.stack([image.pixels for image in images]).unsqueeze(0),
            aspect_ratio_ids=torch.tensor([[aspect_ratio_id(i.grid, TILES) for i in images]]),
            aspect_ratio_mask=torch.stack([tile_mask(i.grid, TILES) for i in images])[None].long(),
            cross_attention_mask=torch.from_numpy(seen),
        ).logits[0]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> Seeing:
    return make_seeing(
        config(),
        tmp_path_factory.mktemp("models"),
        expected,
        special=SPECIAL,
        spelled=PLACE,
        flavour="ollama",
    )


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(seeing, check) -> None:
    CHECKS[check](seeing)


def test_more_images_than_the_model_has_room_for_are_refused(seeing) -> None:
    images = tuple(ImagePart(png(20, 20, seed)) for seed in range(5))
    with pytest.raises(RequestError, match="has 5 images; this model takes at most 4"):
        seeing.model.prepare([Message("user", images)])
