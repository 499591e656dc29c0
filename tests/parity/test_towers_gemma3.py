"""Features of Gemma 3's tower against `transformers`, on tiny random models."""

import pytest
import torch
from transformers import Gemma3Config, Gemma3TextConfig, SiglipVisionConfig

from model_zoo.models.gemma3.vision import build_tower
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
    random_pixels,
    worst,
)

TEXT = Gemma3TextConfig(
    hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, intermediate_size=96, query_pre_attn_scalar=16,
)  # fmt: skip


def config(rows: int = 9, **changes) -> Gemma3Config:
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "image_size": 84, "patch_size": 14}
    vision = SiglipVisionConfig(**(sizes | changes))
    return Gemma3Config(text_config=TEXT, vision_config=vision, mm_tokens_per_image=rows)


CONFIGS = {
    "pools_squares_of_two": config(),
    "pools_nothing": config(rows=36),
    "a_border_is_left_out": config(rows=4, image_size=70),
    "other_eps": config(layer_norm_eps=1e-2),
    "more_rows_than_a_slab": config(image_size=96, patch_size=2, rows=64, num_hidden_layers=1),
}


@pytest.fixture(scope="module", params=[(c, f) for c in CONFIGS for f in FLAVOURS], ids=str)
def vision(request, tmp_path_factory) -> VisionModel:
    name, flavour = request.param
    folder = tmp_path_factory.mktemp("models")
    return make_eyes(build_tower, CONFIGS[name], folder, flavour=flavour)


def expected(vision: VisionModel, pixels: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return vision.twin.get_image_features(pixels).pooler_output


def pixels_for(vision: VisionModel, images: int) -> torch.Tensor:
    return random_pixels(images, *vision.tower.largest().pixels.shape)


@pytest.mark.parametrize("images", [1, 3])
def test_features_agree(vision, images) -> None:
    pixels = pixels_for(vision, images)
    check_features(vision, pixels, expected(vision, pixels))


def test_declared_limits_hold(vision) -> None:
    check_limits(vision.tower, images=2)


def test_all_rows_of_an_image_are_computed_at_once(vision) -> None:
    assert vision.tower.limits.whole == vision.tower.limits.rows


def test_features_do_not_depend_on_the_other_images(vision) -> None:
    check_each_alone(vision, pixels_for(vision, 3))


def swapped(path, target):
    """As older converters named the two matrices of a layer."""
    tensors = matrices(path)
    names = [name for name in tensors if ".ffn_up." in name or ".ffn_down." in name]
    changed = dict.fromkeys(names)
    exchange = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    for name in names:
        before, middle, after = name.rpartition(".")[0].rpartition(".")[0], *name.split(".")[-2:]
        changed[f"{before}.{exchange[middle]}.{after}"] = tensors[name]
    return rewrite(path, target, keys={"general.architecture": "clip"}, tensors=changed)


def test_names_of_the_feed_forward_may_be_exchanged(tmp_path) -> None:
    vision = make_eyes(build_tower, config(), tmp_path, flavour="llama.cpp")
    tower = load_tower(build_tower, swapped(vision.path, tmp_path / "swapped.gguf"))
    pixels = pixels_for(vision, 1)
    assert torch.equal(encoded(tower, pixels), encoded(vision.tower, pixels))


def test_ollamas_older_prefix_and_key_are_known(tmp_path) -> None:
    vision = make_eyes(build_tower, config(), tmp_path, flavour="ollama")
    older = {
        name: None if name.startswith("v.") else array
        for name, array in matrices(vision.path).items()
    }
    older |= {
        f"vision.{name.removeprefix('v.')}": array
        for name, array in matrices(vision.path).items()
        if name.startswith("v.")
    }
    keys = {
        "general.architecture": "gemma3",
        "gemma3.mm.tokens_per_image": None,
        "gemma3.mm_tokens_per_image": 9,
        "gemma3.vision.attention.layer_norm_epsilon": None,
    }
    path = rewrite(vision.path, tmp_path / "older.gguf", keys=keys, tensors=older)
    tower = load_tower(build_tower, path)
    pixels = pixels_for(vision, 1)
    assert torch.equal(encoded(tower, pixels), encoded(vision.tower, pixels))


@pytest.mark.parametrize("type", ["f16", "q8_0"])
def test_smaller_copies_agree(tmp_path, type) -> None:
    """Towers are never put in blocks; halves round by a part in two thousand."""
    vision = make_eyes(build_tower, config(), tmp_path, flavour="llama.cpp", type=type)
    pixels = pixels_for(vision, 2)
    assert 0 < worst(encoded(vision.tower, pixels), expected(vision, pixels)) <= 1e-2
