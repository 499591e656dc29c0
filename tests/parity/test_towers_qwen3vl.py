"""Features of Qwen3-VL's tower against `transformers`, on tiny random models."""

import pytest
import torch
from torch import Tensor
from transformers import Qwen3VLConfig

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import STANDARD
from model_zoo.models.qwen3vl import vision as qwen3vl
from model_zoo.multimodal.qwen_image_processor import QwenVLProcessor
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
    "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "intermediate_size": 96,
}  # fmt: skip


def config(**changes) -> Qwen3VLConfig:
    sizes = {"hidden_size": 48, "intermediate_size": 80, "depth": 4, "num_heads": 3}
    sizes |= {"patch_size": 4, "num_position_embeddings": 49, "out_hidden_size": 64}
    sizes |= {"deepstack_visual_indexes": [0, 2]}
    return Qwen3VLConfig(text_config=TEXT, vision_config=sizes | changes)


CONFIGS = {
    "plain": config(),
    "merges_nothing": config(spatial_merge_size=1),
    "one_place": config(num_position_embeddings=1),
    "the_last_layer_is_deep": config(deepstack_visual_indexes=[1, 2, 3]),
}


def build_tower(w: TensorScope, metadata: Metadata) -> VisionTower:
    """For images of up to 211 rows, a prime: no image has exactly as many."""
    keys = "vision.patch_size", "vision.spatial_merge_size"
    patch, merge = (metadata.require_size(key) for key in keys)
    area = 211 * (patch * merge) ** 2
    images = QwenVLProcessor(patch, merge, 2, 1, area, STANDARD)
    return qwen3vl.build_tower(w, metadata, images=images)


@pytest.fixture(scope="module", params=[(c, f) for c in CONFIGS for f in FLAVOURS], ids=str)
def vision(request, tmp_path_factory) -> VisionModel:
    name, flavour = request.param
    folder = tmp_path_factory.mktemp("models")
    return make_eyes(build_tower, CONFIGS[name], folder, flavour=flavour)


def pixels_of(vision: VisionModel, images: int, grid: tuple[int, int]) -> Tensor:
    """As the model's own processor lays them out; here frames differ."""
    patches = grid[0] * grid[1] * vision.twin.config.vision_config.spatial_merge_size**2
    return random_pixels(images, patches, 3 * 2 * 4**2)


def expected(vision: VisionModel, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    merge = vision.twin.config.vision_config.spatial_merge_size
    sizes = torch.tensor([[1, grid[0] * merge, grid[1] * merge]] * len(pixels))
    with torch.inference_mode():
        found = vision.twin.model.get_image_features(pixels.flatten(0, 1), sizes)
    deep = [torch.stack(part) for part in found.deepstack_features]
    return torch.cat([torch.stack(found.pooler_output), *deep], dim=-1)


# Of merged rows.
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


def test_rows_have_parts_for_as_many_text_layers(vision) -> None:
    deep = len(vision.twin.config.vision_config.deepstack_visual_indexes)
    assert vision.tower.limits.width == (1 + deep) * 64
