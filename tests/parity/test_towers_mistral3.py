"""Features of Mistral 3's tower against `transformers`, on tiny random models."""

import pytest
import torch
from tokenizers import AddedToken
from transformers import (
    Mistral3Config,
    MistralConfig,
    PixtralVisionConfig,
    PreTrainedTokenizerFast,
)

from model_zoo.convert.convert import convert
from model_zoo.models.mistral3.vision import build_tower
from runtime.errors import UnsupportedModelError
from tests.gguf_files import matrices
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
)
from tests.tiny_models import write_tiny_folder

TEXT = {
    "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "intermediate_size": 96, "rms_norm_eps": 1e-3,
}  # fmt: skip
TURNS = {"rope_type": "axial", "rope_theta": 100.0}


def config(*, bias: bool = False, merge: int = 2, **changes) -> Mistral3Config:
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 3, "image_size": 60, "patch_size": 6, "hidden_act": "silu"}
    return Mistral3Config(
        text_config=MistralConfig(**TEXT),
        vision_config=PixtralVisionConfig(**(sizes | changes)),
        multimodal_projector_bias=bias,
        spatial_merge_size=merge,
    )


CONFIGS = {
    "plain": (config(), FLAVOURS),
    "biases": (config(bias=True), FLAVOURS),
    "merges_squares_of_three": (config(merge=3, image_size=54), FLAVOURS),
    "turns_more": (config(rope_parameters=TURNS), ("ollama",)),
    "gate_of_gelu": (config(hidden_act="gelu"), ("llama.cpp",)),
}
CASES = [(name, flavour) for name, (_, flavours) in CONFIGS.items() for flavour in flavours]


@pytest.fixture(scope="module", params=CASES, ids=str)
def vision(request, tmp_path_factory) -> VisionModel:
    name, flavour = request.param
    folder = tmp_path_factory.mktemp("models")
    return make_eyes(build_tower, CONFIGS[name][0], folder, flavour=flavour)


def expected(vision: VisionModel, pixels: torch.Tensor) -> torch.Tensor:
    sizes = torch.tensor([pixels.shape[2:]] * len(pixels))
    with torch.inference_mode():
        return torch.stack(vision.twin.model.get_image_features(pixels, sizes).pooler_output)


# Of a picture in patches, multiples of the merged squares.
SHAPES = [(6, 6), (6, 12), (12, 6), (18, 6)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("images", [1, 2])
def test_features_agree(vision, images, shape) -> None:
    pixels = random_pixels(images, 3, *(6 * side for side in shape))
    check_features(vision, pixels, expected(vision, pixels))


def test_declared_limits_hold(vision) -> None:
    check_limits(vision.tower, images=2)


def test_features_do_not_depend_on_the_other_images(vision) -> None:
    check_each_alone(vision, random_pixels(3, 3, 36, 72))


def test_a_picture_of_many_slabs_agrees(tmp_path) -> None:
    vision = make_eyes(build_tower, config(patch_size=2), tmp_path, flavour="llama.cpp")
    pixels = random_pixels(1, 3, 80, 72)
    check_features(vision, pixels, expected(vision, pixels))


@pytest.mark.parametrize(
    "flavour, changes",
    [("ollama", {"hidden_act": "gelu"}), ("llama.cpp", {"rope_parameters": TURNS})],
)
def test_what_a_flavour_cannot_say_is_refused(tmp_path, flavour, changes) -> None:
    with pytest.raises(UnsupportedModelError, match="vision part is"):
        make_eyes(build_tower, config(**changes), tmp_path, flavour=flavour)


def test_what_stands_behind_a_line_of_the_picture_is_the_text_models_own(tmp_path) -> None:
    """Readers of llama.cpp's files take the row from the projector's; ours know it as a token."""
    folder, path = tmp_path / "folder", tmp_path / "tiny.gguf"
    twin = write_tiny_folder(folder, config(), padding_rows=1)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken("[IMG_BREAK]", special=True)])
    tokenizer.save_pretrained(folder)
    _, own = convert(folder, path, type="f32")
    row = twin.model.language_model.embed_tokens.weight[-1]
    assert torch.equal(torch.from_numpy(matrices(own)["v.token_embd.img_break"].copy()), row)
    tower = load_tower(build_tower, own)
    assert encoded(tower, random_pixels(1, 3, 24, 36)).shape == (1, 6, 64)
