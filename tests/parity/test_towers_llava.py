"""Features of LLaVA 1.5's tower against `transformers`, on tiny random models."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

from model_zoo.models.llava.vision import CLIP_LAYERS, FEATURE_KEY, build_tower
from runtime.errors import ModelFileError, UnsupportedModelError
from tests.gguf_files import matrices, rewrite
from tests.parity.towers import (
    VisionModel,
    check_features,
    check_limits,
    check_text_beside,
    encoded,
    load_tower,
    make_eyes,
    random_pixels,
)

TEXT = {
    "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96,
}  # fmt: skip


def config(layer: int = -2, **changes) -> LlavaConfig:
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "image_size": 36, "patch_size": 6}
    return LlavaConfig(
        text_config=LlamaConfig(**TEXT),
        vision_config=CLIPVisionConfig(**(sizes | changes)),
        vision_feature_layer=layer,
    )


CONFIGS = {
    "plain": config(),
    "features_of_the_last_layer": config(layer=-1),
    "features_of_the_first_layer": config(layer=1),
    "other_eps": config(layer_norm_eps=1e-2),
}


@pytest.fixture(scope="module", params=CONFIGS)
def vision(request, tmp_path_factory) -> VisionModel:
    folder = tmp_path_factory.mktemp("models")
    return make_eyes(build_tower, CONFIGS[request.param], folder, flavour="llama.cpp")


def expected(vision: VisionModel, pixels: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.stack(vision.twin.get_image_features(pixels).pooler_output)


@pytest.mark.parametrize("images", [1, 3])
def test_features_agree(vision, images) -> None:
    pixels = random_pixels(images, 3, 36, 36)
    check_features(vision, pixels, expected(vision, pixels))


def test_declared_limits_hold(vision) -> None:
    check_limits(vision.tower, images=2)


def changed(
    vision: VisionModel, layers: int | None = None, *, only: int | None = None, **keys
) -> Path:
    """A copy that says `layers` are projected; `only`: of so many layers, the first ones."""
    named = {"general.architecture": "clip", f"clip.{FEATURE_KEY}": layers and [layers], **keys}
    tensors = {}
    if only is not None:
        named["clip.vision.block_count"] = only
        kept = tuple(f"v.blk.{layer}." for layer in range(only))
        names = [name for name in matrices(vision.path) if name.startswith("v.blk.")]
        tensors = {name: None for name in names if not name.startswith(kept)}
    path = vision.path.with_name("changed.gguf")
    return rewrite(vision.path, path, keys=named, tensors=tensors)


@pytest.mark.parametrize("only", [None, CLIP_LAYERS - 1])
def test_a_silent_file_means_the_last_layer_but_one_of_clip(tmp_path, only) -> None:
    """Older converters left the last one out."""
    vision = make_eyes(
        build_tower, config(num_hidden_layers=CLIP_LAYERS), tmp_path, flavour="llama.cpp"
    )
    pixels = random_pixels(1, 3, 36, 36)
    features = encoded(load_tower(build_tower, changed(vision, only=only)), pixels)
    assert torch.equal(features, encoded(vision.tower, pixels))


def test_a_silent_file_with_other_layers_has_those_that_are_computed(tmp_path) -> None:
    vision = make_eyes(build_tower, config(), tmp_path, flavour="llama.cpp")
    pixels = random_pixels(1, 3, 36, 36)
    features = encoded(load_tower(build_tower, changed(vision, only=2)), pixels)
    assert torch.equal(features, encoded(vision.tower, pixels))


def test_layers_that_are_not_there_or_several_are_refused(tmp_path) -> None:
    vision = make_eyes(build_tower, config(), tmp_path, flavour="llama.cpp")
    with pytest.raises(ModelFileError, match="is 4, of 3 layers"):
        load_tower(build_tower, changed(vision, 4))
    several = changed(vision, **{f"clip.{FEATURE_KEY}": [1, 2]})
    with pytest.raises(UnsupportedModelError, match=r"from the layers \[1, 2\], not from a single"):
        load_tower(build_tower, several)


def test_a_file_that_does_not_name_its_projector_is_read_as_one(tmp_path) -> None:
    vision = make_eyes(build_tower, config(), tmp_path, flavour="llama.cpp")
    keys = {"general.architecture": "clip", "clip.projector_type": None}
    path = rewrite(vision.path, tmp_path / "silent.gguf", keys=keys)
    pixels = random_pixels(1, 3, 36, 36)
    features = encoded(load_tower(build_tower, path), pixels)
    assert torch.equal(features, encoded(vision.tower, pixels))


def test_the_text_model_beside_is_a_file_of_its_own_family(tmp_path) -> None:
    check_text_beside(make_eyes(build_tower, config(), tmp_path, flavour="llama.cpp"))
