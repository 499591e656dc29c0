"""Features of Gemma 4's tower against `transformers`, on tiny random models."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForImageTextToText,
    Gemma4Config,
    Gemma4TextConfig,
    Gemma4VisionConfig,
)

from model_zoo.layers.vision.clamped import BOUNDS, MATRICES
from model_zoo.models.gemma4.vision import build_tower
from runtime.errors import ModelFileError, UnsupportedModelError
from runtime.vision.encoder import LocalEncoder
from tests.gguf_files import matrices, rewrite
from tests.parity.gemma4_patches import as_patches
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

PATCH = 4
TEXT = Gemma4TextConfig(
    hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    global_head_dim=16, intermediate_size=96, hidden_size_per_layer_input=0,
    use_bidirectional_attention="vision",
)  # fmt: skip


def config(text: Gemma4TextConfig = TEXT, **changes: Any) -> Gemma4Config:
    sizes: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16}
    sizes |= {"patch_size": PATCH, "position_embedding_size": 900}
    return Gemma4Config(text_config=text, vision_config=Gemma4VisionConfig(**(sizes | changes)))


CONFIGS = {
    "plain": config(),
    "bounded": config(use_clipped_linears=True),
    "standardised": config(standardize=True),
    "merges_squares_of_two": config(pooling_kernel_size=2),
    "other_eps": config(rms_norm_eps=1e-2),
}


class Drawn:
    """Makes models whose bounds cut, and whose other buffers are not what memory held."""

    @staticmethod
    @torch.no_grad()
    def from_config(config: Gemma4Config, **options: Any) -> nn.Module:
        model = AutoModelForImageTextToText.from_config(config, **options)
        for name, buffer in model.named_buffers():
            if name.endswith(BOUNDS):
                buffer.fill_(-1.0 if name.endswith("min") else 1.0)
            if "std_" in name:
                buffer.fill_(1.0)
        return model


def made(folder: Path, of: Gemma4Config, flavour: str) -> VisionModel:
    return make_eyes(build_tower, of, folder, flavour=flavour, maker=Drawn)


@pytest.fixture(scope="module", params=[(c, f) for c in CONFIGS for f in FLAVOURS], ids=str)
def vision(request, tmp_path_factory) -> VisionModel:
    name, flavour = request.param
    return made(tmp_path_factory.mktemp("models"), CONFIGS[name], flavour)


def pixels_of(vision: VisionModel, images: int, grid: tuple[int, int]) -> Tensor:
    high, wide = (side * vision.tower.pooled * PATCH for side in grid)
    return random_pixels(images, 3, high, wide)


def expected(vision: VisionModel, pixels: Tensor) -> Tensor:
    patches, places = as_patches(pixels, PATCH)
    each = places.expand(len(pixels), -1, -1)
    with torch.inference_mode():
        return torch.stack(vision.twin.model.get_image_features(patches, each).pooler_output)


GRIDS = [(4, 4), (1, 7), (5, 2), (9, 13)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("images", [1, 2])
def test_features_agree(vision, images, grid) -> None:
    pixels = pixels_of(vision, images, grid)
    check_features(vision, pixels, expected(vision, pixels), grid)


def test_a_prime_number_of_rows_is_encoded_at_the_start(tmp_path) -> None:
    vision = made(tmp_path, config(), "ollama")
    unit = 3 * PATCH
    keys = {"general.architecture": "gemma4", "gemma4.vision.image_max_pixels": 53 * unit**2}
    tower = load_tower(build_tower, rewrite(vision.path, tmp_path / "prime.gguf", keys=keys))
    assert tower.largest().grid == (1, 53)
    check_limits(tower, images=1)
    encoder = LocalEncoder(tower, device=torch.device("cpu"))
    encoder.warm_up()
    encoder.close()


def test_declared_limits_hold(vision) -> None:
    check_limits(vision.tower, images=2)


def test_features_do_not_depend_on_the_other_images(vision) -> None:
    check_each_alone(vision, pixels_of(vision, 3, (2, 3)), (2, 3))


def test_bounds_cut(tmp_path) -> None:
    """So the tests above mean something."""
    vision = made(tmp_path, CONFIGS["bounded"], "llama.cpp")
    free = {name: None for name in matrices(vision.path) if name.endswith(BOUNDS)}
    assert len(free) == 2 * len(MATRICES) * len(BOUNDS)
    keys = {"general.architecture": "clip"}
    path = rewrite(vision.path, tmp_path / "free.gguf", keys=keys, tensors=free)
    pixels = pixels_of(vision, 1, (2, 3))
    features = encoded(load_tower(build_tower, path), pixels, (2, 3))
    assert worst(features, encoded(vision.tower, pixels, (2, 3))) > 0.1


def test_bounds_may_be_listed_in_one_tensor(tmp_path) -> None:
    """As the first files of Ollama have them; the last four are the projection's."""
    vision = made(tmp_path, CONFIGS["bounded"], "ollama")
    stored = matrices(vision.path)
    names = [
        f"v.blk.{layer}.{matrix}.{bound}"
        for layer in range(2)
        for matrix in MATRICES
        for bound in BOUNDS
    ]
    wide = [-3.4e38, 3.4e38] * 2
    listed = np.concatenate([*(stored[name] for name in names), np.array(wide, np.float32)])
    tensors = {"v.clamp_data": listed, **dict.fromkeys(names)}
    keys = {"general.architecture": "gemma4"}
    path = rewrite(vision.path, tmp_path / "listed.gguf", keys=keys, tensors=tensors)
    pixels = pixels_of(vision, 1, (2, 3))
    features = encoded(load_tower(build_tower, path), pixels, (2, 3))
    assert torch.equal(features, encoded(vision.tower, pixels, (2, 3)))


def test_what_hears_is_left_alone(tmp_path) -> None:
    vision = made(tmp_path, config(), "llama.cpp")
    ears = {"a.blk.0.attn_q.weight": np.ones((2, 2), np.float32)}
    ears["mm.a.fc.weight"] = np.ones((2, 2), np.float32)
    keys = {"general.architecture": "clip"}
    path = rewrite(vision.path, tmp_path / "ears.gguf", keys=keys, tensors=ears)
    pixels = pixels_of(vision, 1, (2, 3))
    features = encoded(load_tower(build_tower, path), pixels, (2, 3))
    assert torch.equal(features, encoded(vision.tower, pixels, (2, 3)))


def test_more_rows_than_there_are_places_for_are_refused(tmp_path) -> None:
    with pytest.raises(ModelFileError, match="allows 280 rows, more than there are places for"):
        made(tmp_path, config(position_embedding_size=839), "llama.cpp")


BOTH_WAYS = {"hidden_size_per_layer_input": 32, "use_bidirectional_attention": "vision"}
NO_WAY = {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": None}


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (config(num_key_value_heads=1), "share keys"),
        (config(head_dim=8), "not parts of the hidden size"),
        (config(hidden_activation="silu"), "`hidden_activation`"),
        (config(rope_parameters={"rope_type": "axial", "rope_theta": 50.0}), "rotary base"),
        (config(Gemma4TextConfig(**(TEXT.to_dict() | BOTH_WAYS))), "do not say it"),
        (config(Gemma4TextConfig(**(TEXT.to_dict() | NO_WAY))), "do not say it"),
    ],
)
def test_what_files_cannot_say_is_refused(tmp_path, of, words) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        made(tmp_path, of, "llama.cpp")
