"""Features of Qwen2.5-VL's tower against `transformers`, on tiny random models."""

import pytest
import torch
from torch import Tensor
from transformers import Qwen2_5_VLConfig

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import CLIP
from model_zoo.models.qwen25vl import vision as qwen25vl
from model_zoo.multimodal.qwen_image_processor import QwenVLProcessor
from runtime.errors import UnsupportedModelError
from runtime.vision.encoder import VisionTower
from tests.parity.towers import (
    FLAVOURS,
    VisionModel,
    check_each_alone,
    check_features,
    check_limits,
    make_eyes,
    random_pixels,
)

TEXT = {
    "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96,
}  # fmt: skip


def config(**changes) -> Qwen2_5_VLConfig:
    vision = {"hidden_size": 48, "intermediate_size": 80, "depth": 4, "num_heads": 3}
    vision |= {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1, 3]}
    return Qwen2_5_VLConfig(
        text_config=TEXT, vision_config=vision | {"out_hidden_size": 64} | changes
    )


CONFIGS = {
    "plain": (config(), FLAVOURS),
    "windows_of_three_by_three": (config(window_size=84), ("ollama",)),
    "windows_of_one_row": (config(window_size=28), ("ollama",)),
    "merges_nothing": (config(spatial_merge_size=1, patch_size=28), FLAVOURS),
    "sees_all_in_every_layer": (config(fullatt_block_indexes=[0, 1, 2, 3]), FLAVOURS),
}
CASES = [(name, flavour) for name, (_, flavours) in CONFIGS.items() for flavour in flavours]


def build_tower(w: TensorScope, metadata: Metadata) -> VisionTower:
    """For images of up to 211 rows, a prime: no image has exactly as many."""
    keys = "vision.patch_size", "vision.spatial_merge_size"
    patch, merge = (metadata.require_size(key) for key in keys)
    area = 211 * (patch * merge) ** 2
    images = QwenVLProcessor(patch, merge, 2, 1, area, CLIP)
    return qwen25vl.build_tower(w, metadata, images=images)


@pytest.fixture(scope="module", params=CASES, ids=str)
def vision(request, tmp_path_factory) -> VisionModel:
    name, flavour = request.param
    folder = tmp_path_factory.mktemp("models")
    return make_eyes(build_tower, CONFIGS[name][0], folder, flavour=flavour)


def pixels_of(vision: VisionModel, images: int, grid: tuple[int, int]) -> Tensor:
    """As the model's own processor lays them out; here frames differ."""
    config = vision.twin.config.vision_config
    patches = grid[0] * grid[1] * config.spatial_merge_size**2
    return random_pixels(images, patches, 3 * 2 * config.patch_size**2)


def expected(vision: VisionModel, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    merge = vision.twin.config.vision_config.spatial_merge_size
    sizes = torch.tensor([[1, grid[0] * merge, grid[1] * merge]] * len(pixels))
    with torch.inference_mode():
        found = vision.twin.model.get_image_features(pixels.flatten(0, 1), sizes)
    return torch.stack(found.pooler_output)


# Of merged rows; windows hold four by four.
GRIDS = [(6, 6), (7, 5), (1, 4), (5, 2), (3, 8)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("images", [1, 2])
def test_features_agree(vision, images, grid) -> None:
    pixels = pixels_of(vision, images, grid)
    check_features(vision, pixels, expected(vision, pixels, grid), grid)


def test_declared_limits_hold(vision) -> None:
    check_limits(vision.tower, images=2)


def test_features_do_not_depend_on_the_other_images(vision) -> None:
    check_each_alone(vision, pixels_of(vision, 3, (4, 5)), (4, 5))


def test_other_windows_are_refused_where_readers_know_one(tmp_path) -> None:
    with pytest.raises(UnsupportedModelError, match="`window_size` of the vision part is 84"):
        make_eyes(build_tower, config(window_size=84), tmp_path, flavour="llama.cpp")


def test_layers_that_a_flavour_cannot_list_are_refused(tmp_path) -> None:
    odd = config(fullatt_block_indexes=[0, 3])
    make_eyes(build_tower, odd, tmp_path, flavour="ollama")
    with pytest.raises(UnsupportedModelError, match="every so many-th"):
        make_eyes(build_tower, odd, tmp_path, flavour="llama.cpp")
