"""Every vision model against `transformers`, on tiny random models: from pictures to logits."""

import pytest
import torch

from model_zoo.chat.messages import ImagePart, Message
from model_zoo.registry import load
from runtime.errors import ConfigurationError, RequestError
from tests.families.vision_agreement import CHECKS, CPU, FLAVOURS, VisionPair, check_chunks
from tests.families.vision_families import VISION_MODELS
from tests.gguf_files import rewrite
from tests.vision_prompts import png

CASES = [
    (name, config, flavour)
    for name, row in VISION_MODELS.items()
    for config in row.configs
    for flavour in row.flavours
]
# All checks have the first flavour of each configuration.
FIRST = [*{case[:2]: case for case in reversed(CASES)}.values()]
OTHERS = [case for case in CASES if case not in FIRST]
GRIDS = [name for name, row in VISION_MODELS.items() if row.grids]


@pytest.fixture(scope="module", params=FIRST, ids="-".join)
def pair(request, tmp_path_factory) -> VisionPair:
    family, config, flavour = request.param
    folder = tmp_path_factory.mktemp("models")
    return VISION_MODELS[family].write(folder, config, flavour=flavour)


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(pair, check) -> None:
    CHECKS[check](pair)


@pytest.mark.parametrize("pair", OTHERS, ids="-".join, indirect=True)
def test_logits_with_files_of_other_flavours_agree(pair) -> None:
    check_chunks(pair)


@pytest.mark.parametrize("family", GRIDS)
def test_images_of_these_checks_have_several_shapes_and_are_no_squares(tmp_path, family) -> None:
    row = VISION_MODELS[family]
    prompt = row.write(tmp_path).prompt("two images in one message")
    assert [image.grid for image in prompt.images] == row.grids


def test_padding_of_llava_next_tiles_is_left_out(tmp_path) -> None:
    prompt = VISION_MODELS["llava_next"].write(tmp_path).prompt("two images in one message")
    # The whole image has 16 rows; three tiles in a line or a column have 12 rows along them, of
    # which only those with the image count, and a row for the end of each line.
    assert [(len(image.pixels), image.rows) for image in prompt.images] == [
        (1 + 3, 16 + 4 * (8 + 1)),
        (1 + 3, 16 + 8 * (4 + 1)),
    ]


def test_internvl_with_internlm_2_agrees(tmp_path) -> None:
    """The text model of InternVL 2 8B, which computes as Llama and whose files have its names."""
    pair = VISION_MODELS["internvl"].write(tmp_path, "llama")
    text = rewrite(tmp_path / "tiny.gguf", tmp_path / "internlm2.gguf", architecture="internlm2")
    files = {"projector": tmp_path / "mmproj-tiny.gguf", "device": CPU, "dtype": torch.float32}
    check_chunks(VisionPair(load(text, **files), pair.twin, pair.expected))


def test_more_images_than_mllama_accepts_are_refused(tmp_path) -> None:
    images = tuple(ImagePart(png(20, 20, seed)) for seed in range(5))
    model = VISION_MODELS["mllama"].write(tmp_path).model
    with pytest.raises(RequestError, match="has 5 images; this model takes at most 4"):
        model.prepare([Message("user", images)])


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_features_for_more_layers_than_the_text_model_has_are_refused(tmp_path, flavour) -> None:
    with pytest.raises(ConfigurationError, match=r"first 2 layers .* at least 3, .* has 2"):
        VISION_MODELS["qwen3vl"].write(tmp_path, flavour=flavour, text={"num_hidden_layers": 2})
