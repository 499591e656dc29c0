"""Features of InternVL's tower against `transformers`, on tiny random models."""

import pytest
import torch
from torch import Tensor
from transformers import InternVLConfig

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.models.internvl import vision as internvl
from model_zoo.models.internvl.multimodal import read_processor
from runtime.vision.encoder import VisionTower
from tests.gguf_files import matrices, rewrite
from tests.parity.towers import (
    VisionModel,
    check_each_alone,
    check_features,
    check_limits,
    check_text_beside,
    encoded,
    load_tower,
    make_eyes,
    random_tiles,
)

TEXT = {
    "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96,
}  # fmt: skip


def config(ratio: float = 0.5, **changes) -> InternVLConfig:
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "image_size": [36, 36], "patch_size": [6, 6]}
    text = {"model_type": "qwen2", **TEXT}
    return InternVLConfig(text_config=text, vision_config=sizes | changes, downsample_ratio=ratio)


CONFIGS = {
    "plain": config(),
    "biases": config(attention_bias=True),
    "norms_of_queries_and_keys": config(use_qk_norm=True, norm_type="rms_norm"),
    "shuffles_nothing": config(ratio=1.0),
    "norm_after_the_layers": config(use_mean_pooling=False),
}


def build_tower(w: TensorScope, metadata: Metadata) -> VisionTower:
    return internvl.build_tower(w, metadata, images=read_processor(metadata))


@pytest.fixture(scope="module", params=CONFIGS)
def vision(request, tmp_path_factory) -> VisionModel:
    folder = tmp_path_factory.mktemp("models")
    return make_eyes(build_tower, CONFIGS[request.param], folder, flavour="llama.cpp")


def expected(vision: VisionModel, pixels: Tensor) -> Tensor:
    with torch.inference_mode():
        features = vision.twin.get_image_features(pixels.flatten(0, 1)).pooler_output
    return features.reshape(len(pixels), -1, features.shape[-1])


@pytest.mark.parametrize("tiles", [1, 5])
@pytest.mark.parametrize("images", [1, 2])
def test_features_agree(vision, images, tiles) -> None:
    pixels = random_tiles(vision, images, tiles)
    check_features(vision, pixels, expected(vision, pixels))


def test_declared_limits_hold(vision) -> None:
    check_limits(vision.tower, images=1)


def test_features_do_not_depend_on_the_other_images(vision) -> None:
    check_each_alone(vision, random_tiles(vision, 3, 2))


def test_tables_may_have_dimensions_of_one_before_the_others(tmp_path) -> None:
    vision = make_eyes(build_tower, config(), tmp_path, flavour="llama.cpp")
    tables = {
        name: array.reshape(1, -1, array.shape[-1])
        for name, array in matrices(vision.path).items()
        if name in ("v.class_embd", "v.position_embd.weight")
    }
    assert len(tables) == 2
    keys = {"general.architecture": "clip"}
    path = rewrite(vision.path, tmp_path / "deeper.gguf", keys=keys, tensors=tables)
    pixels = random_tiles(vision, 1, 2)
    features = encoded(load_tower(build_tower, path), pixels)
    assert torch.equal(features, encoded(vision.tower, pixels))


def test_the_text_model_beside_is_a_file_of_its_own_family(tmp_path) -> None:
    check_text_beside(make_eyes(build_tower, config(), tmp_path, flavour="llama.cpp"))
