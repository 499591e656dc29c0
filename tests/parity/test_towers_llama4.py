"""Features of Llama 4's tower against `transformers`, on tiny random models."""

import pytest
import torch
from torch import Tensor
from transformers import Llama4Config

from model_zoo.models.llama4.vision import build_tower
from runtime.errors import ModelFileError, UnsupportedModelError
from tests.gguf_files import matrices, rewrite
from tests.parity.towers import (
    FLAVOURS,
    VisionModel,
    check_each_alone,
    check_features,
    check_limits,
    encoded,
    load_tower,
    make_eyes,
    random_tiles,
)

TEXT = {
    "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "intermediate_size": 96, "intermediate_size_mlp": 96,
    "num_local_experts": 2,
}  # fmt: skip
TURNS = {"rope_type": "default", "rope_theta": 100.0}


def config(hidden: int = 48, ratio: float = 0.5, **changes) -> Llama4Config:
    sizes = {"hidden_size": hidden, "intermediate_size": int(hidden / ratio**2)}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 36, "patch_size": 6}
    sizes |= {"projector_input_dim": 40, "projector_output_dim": 40, "vision_output_dim": 40}
    return Llama4Config(
        text_config=TEXT, vision_config=sizes | {"pixel_shuffle_ratio": ratio} | changes
    )


CONFIGS = {
    "plain": (config(), FLAVOURS),
    "one_row_of_two_by_two_patches": (config(image_size=12), FLAVOURS),
    "shuffles_nothing": (config(ratio=1.0), FLAVOURS),
    "turns_more": (config(rope_parameters=TURNS), ("ollama",)),
}
CASES = [(name, flavour) for name, (_, flavours) in CONFIGS.items() for flavour in flavours]


@pytest.fixture(scope="module", params=CASES, ids=str)
def vision(request, tmp_path_factory) -> VisionModel:
    name, flavour = request.param
    folder = tmp_path_factory.mktemp("models")
    return make_eyes(build_tower, CONFIGS[name][0], folder, flavour=flavour)


def expected(vision: VisionModel, pixels: Tensor) -> Tensor:
    with torch.inference_mode():
        rows = vision.twin.get_image_features(pixels.flatten(0, 1), return_dict=True)
        features = vision.twin.multi_modal_projector(rows.last_hidden_state)
    return features.view(len(pixels), -1, features.shape[-1])


@pytest.mark.parametrize("tiles", [1, 3, 7])
@pytest.mark.parametrize("images", [1, 2])
def test_features_agree(vision, images, tiles) -> None:
    pixels = random_tiles(vision, images, tiles)
    check_features(vision, pixels, expected(vision, pixels))


def test_declared_limits_hold(vision) -> None:
    check_limits(vision.tower, images=1)


def test_features_do_not_depend_on_the_other_images(vision) -> None:
    check_each_alone(vision, random_tiles(vision, 3, 2))


def test_another_name_of_the_second_norm_is_known(tmp_path) -> None:
    vision = make_eyes(build_tower, config(), tmp_path, flavour="llama.cpp")
    norms = {name: array for name, array in matrices(vision.path).items() if ".ln2." in name}
    renamed = {name.replace(".ln2.", ".attn_post_norm."): array for name, array in norms.items()}
    path = rewrite(
        vision.path,
        tmp_path / "renamed.gguf",
        keys={"general.architecture": "clip"},
        tensors=dict.fromkeys(norms) | renamed,
    )
    pixels = random_tiles(vision, 1, 2)
    features = encoded(load_tower(build_tower, path), pixels)
    assert torch.equal(features, encoded(vision.tower, pixels))


def test_another_rotary_base_is_refused_where_files_do_not_state_it(tmp_path) -> None:
    with pytest.raises(UnsupportedModelError, match="rotary base"):
        make_eyes(build_tower, config(rope_parameters=TURNS), tmp_path, flavour="llama.cpp")


def test_tiles_that_cannot_be_shuffled_are_refused(tmp_path) -> None:
    vision = make_eyes(build_tower, config(), tmp_path, flavour="ollama")
    keys = {"general.architecture": "llama4", "llama4.vision.pixel_shuffle_ratio": 0.25}
    path = rewrite(vision.path, tmp_path / "changed.gguf", keys=keys)
    with pytest.raises(ModelFileError, match="6 patches across, which 4 does not divide"):
        load_tower(build_tower, path)
