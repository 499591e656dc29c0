"""Features of Idefics 3 and SmolVLM's tower against `transformers`, on tiny random models."""

import pytest
import torch
from torch import Tensor
from transformers import Idefics3Config, PreTrainedConfig, SmolVLMConfig

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.models.idefics3 import vision as idefics3
from model_zoo.models.idefics3.multimodal import read_processor
from runtime.vision.encoder import VisionTower
from tests.parity.towers import (
    VisionModel,
    check_each_alone,
    check_features,
    check_limits,
    check_text_beside,
    make_eyes,
    random_tiles,
)

TEXT = {
    "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96,
}  # fmt: skip


def config(kind: type[PreTrainedConfig], shuffled: int = 2, **changes) -> PreTrainedConfig:
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "image_size": 36, "patch_size": 6}
    text = {"model_type": "llama", **TEXT}
    return kind(text_config=text, vision_config=sizes | changes, scale_factor=shuffled)


CONFIGS = {
    "idefics3": config(Idefics3Config),
    "smolvlm": config(SmolVLMConfig),
    "shuffles_three_by_three": config(SmolVLMConfig, shuffled=3),
    "other_eps": config(Idefics3Config, layer_norm_eps=1e-2),
}


def build_tower(w: TensorScope, metadata: Metadata) -> VisionTower:
    return idefics3.build_tower(w, metadata, images=read_processor(metadata))


@pytest.fixture(scope="module", params=CONFIGS)
def vision(request, tmp_path_factory) -> VisionModel:
    folder = tmp_path_factory.mktemp("models")
    return make_eyes(build_tower, CONFIGS[request.param], folder, flavour="llama.cpp")


def expected(vision: VisionModel, pixels: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.stack(
            [
                torch.cat(vision.twin.get_image_features(image[None]).pooler_output)
                for image in pixels
            ]
        )


@pytest.mark.parametrize("tiles", [1, 5])
@pytest.mark.parametrize("images", [1, 2])
def test_features_agree(vision, images, tiles) -> None:
    pixels = random_tiles(vision, images, tiles)
    check_features(vision, pixels, expected(vision, pixels))


def test_declared_limits_hold(vision) -> None:
    check_limits(vision.tower, images=1)


def test_features_do_not_depend_on_the_other_images(vision) -> None:
    check_each_alone(vision, random_tiles(vision, 3, 2))


def test_the_text_model_beside_is_a_file_of_its_own_family(tmp_path) -> None:
    check_text_beside(make_eyes(build_tower, CONFIGS["smolvlm"], tmp_path, flavour="llama.cpp"))
