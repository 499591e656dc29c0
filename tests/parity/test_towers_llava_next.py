"""Features of LLaVA 1.6's tower against `transformers`, on tiny random models."""

import pytest
import torch
from torch import Tensor
from transformers import CLIPVisionConfig, LlamaConfig, LlavaNextConfig

from model_zoo.images.tiles import best_canvas
from model_zoo.models.llava.vision_next import build_tower
from runtime.errors import ModelFileError, UnsupportedModelError
from tests.gguf_files import matrices, rewrite
from tests.parity.towers import (
    VisionModel,
    check_each_alone,
    check_features,
    check_limits,
    load_tower,
    make_eyes,
    random_pixels,
)

TEXT = {
    "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96,
}  # fmt: skip
SIDE = 36
CANVASES = [[1, 2], [2, 1], [2, 2], [3, 1], [1, 3]]  # in tiles


def config(canvases=CANVASES, **changes) -> LlavaNextConfig:
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "image_size": SIDE, "patch_size": 6}
    return LlavaNextConfig(
        text_config=LlamaConfig(**TEXT),
        vision_config=CLIPVisionConfig(**(sizes | changes)),
        image_grid_pinpoints=[[SIDE * side for side in canvas] for canvas in canvases],
    )


CONFIGS = {
    "plain": config(),
    "odd_number_of_rows": config(patch_size=7, image_size=SIDE),
    "one_canvas": config([[4, 3]]),
}


@pytest.fixture(scope="module", params=CONFIGS)
def vision(request, tmp_path_factory) -> VisionModel:
    folder = tmp_path_factory.mktemp("models")
    return make_eyes(build_tower, CONFIGS[request.param], folder, flavour="llama.cpp")


def squares_of(vision: VisionModel, images: int, size: tuple[int, int]) -> Tensor:
    """The whole of an image of that size and its tiles."""
    high, wide = best_canvas(*size, vision.tower.canvases)
    return random_pixels(images, 1 + high * wide // SIDE**2, 3, SIDE, SIDE)


def expected(vision: VisionModel, pixels: Tensor, size: tuple[int, int]) -> Tensor:
    sizes = torch.tensor([size] * len(pixels))
    with torch.inference_mode():
        return torch.stack(vision.twin.get_image_features(pixels, sizes).pooler_output)


SIZES = [(72, 72), (36, 72), (30, 100), (1, 500), (500, 1), (71, 33), (100, 97), (13, 17)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("images", [1, 2])
def test_features_agree(vision, images, size) -> None:
    pixels = squares_of(vision, images, size)
    check_features(vision, pixels, expected(vision, pixels, size), size)


def test_declared_limits_hold(vision) -> None:
    check_limits(vision.tower, images=2)


def test_features_do_not_depend_on_the_other_images(vision) -> None:
    check_each_alone(vision, squares_of(vision, 3, (50, 90)), (50, 90))


def changed(folder, **keys):
    vision = make_eyes(build_tower, config(), folder, flavour="llama.cpp")
    named = {f"clip.vision.{name}": value for name, value in keys.items()}
    return rewrite(
        vision.path, folder / "changed.gguf", keys={"general.architecture": "clip", **named}
    )


@pytest.mark.parametrize("merged", ["flat", "spatial"])
def test_rows_that_are_merged_otherwise_are_refused(tmp_path, merged) -> None:
    with pytest.raises(UnsupportedModelError, match=f"`.*mm_patch_merge_type` is {merged};"):
        load_tower(build_tower, changed(tmp_path, mm_patch_merge_type=merged))


@pytest.mark.parametrize(
    "sides", [[36], [36, 72, 72], [36, 40], [0, 36], [36 * 9, 36 * 9], [36] * 258], ids=str
)
def test_canvases_that_cannot_be_are_refused(tmp_path, sides) -> None:
    with pytest.raises(ModelFileError, match="image_grid_pinpoints"):
        load_tower(build_tower, changed(tmp_path, image_grid_pinpoints=sides))


def test_files_say_in_what_order_the_checkpoint_names_its_canvases(tmp_path) -> None:
    vision = make_eyes(build_tower, config([[1, 2], [3, 1]]), tmp_path, flavour="llama.cpp")
    assert vision.tower.canvases == ((SIDE, 2 * SIDE), (3 * SIDE, SIDE))
    row = vision.twin.model.image_newline
    assert torch.equal(torch.from_numpy(matrices(vision.path)["model.image_newline"].copy()), row)
