"""Features of LLaVA 1.5's tower against `transformers`, on tiny random models."""

import pytest
import torch
from torch import Tensor
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

from model_zoo.towers.llava import build_tower
from runtime.errors import UnsupportedModelError
from tests.gguf_files import rewrite
from tests.parity.agreement import CHECKS, Pair, load_decoder
from tests.parity.towers import (
    TOLERANCE,
    Eyes,
    check_limits,
    encoded,
    load_tower,
    make_eyes,
    random_pixels,
    worst,
)
from tests.tiny_models import tiny_tokenizer

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
def eyes(request, tmp_path_factory) -> Eyes:
    folder = tmp_path_factory.mktemp("models")
    return make_eyes(build_tower, CONFIGS[request.param], folder, flavour="llama.cpp")


def expected(eyes: Eyes, pixels: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.stack(eyes.twin.get_image_features(pixels).pooler_output)


@pytest.mark.parametrize("images", [1, 3])
def test_features_agree(eyes, images) -> None:
    pixels = random_pixels(images, 3, 36, 36)
    assert worst(encoded(eyes.tower, pixels), expected(eyes, pixels)) <= TOLERANCE


def test_declared_limits_hold(eyes) -> None:
    check_limits(eyes.tower, images=2)


@pytest.mark.parametrize(
    "keys",
    [{"clip.vision.image_grid_pinpoints": [36, 72]}, {"clip.vision.feature_layer": [1, 2]}],
    ids=str,
)
def test_other_kinds_of_llava_are_refused(tmp_path, keys) -> None:
    eyes = make_eyes(build_tower, config(), tmp_path, flavour="llama.cpp")
    keys = {"general.architecture": "clip", **keys}
    path = rewrite(eyes.path, tmp_path / "changed.gguf", keys=keys)
    with pytest.raises(UnsupportedModelError, match="not served"):
        load_tower(build_tower, path)


def test_a_file_that_does_not_name_its_projector_is_read_as_one(tmp_path) -> None:
    eyes = make_eyes(build_tower, config(), tmp_path, flavour="llama.cpp")
    keys = {"general.architecture": "clip", "clip.projector_type": None}
    path = rewrite(eyes.path, tmp_path / "silent.gguf", keys=keys)
    pixels = random_pixels(1, 3, 36, 36)
    features = encoded(load_tower(build_tower, path), pixels)
    assert torch.equal(features, encoded(eyes.tower, pixels))


def test_the_text_model_beside_is_a_file_of_its_own_family(tmp_path) -> None:
    eyes = make_eyes(build_tower, config(), tmp_path, flavour="llama.cpp")
    pair = Pair(load_decoder(tmp_path / "tiny.gguf"), eyes.twin, tiny_tokenizer().get_vocab_size())
    CHECKS["whole_prompt"](pair)
