"""Images are scaled down to what the served context can hold."""

import numpy as np
import pytest
import torch

from model_zoo.images.normalise import CLIP
from model_zoo.models.hunyuan.image_processor import HunyuanProcessor
from model_zoo.models.kimivl.image_processor import KimiVLProcessor
from model_zoo.models.mistral3.image_processor import PixtralProcessor
from model_zoo.multimodal.bounded_processor import BoundedProcessor
from model_zoo.multimodal.context_share import ScalableProcessor, scaled_to_context

PROCESSORS: dict[str, ScalableProcessor] = {
    "qwen3vl": BoundedProcessor(16, 2, 64 << 10, 16 << 20, CLIP),
    "hunyuan": HunyuanProcessor(BoundedProcessor(16, 2, 512 * 512, 16 << 20, CLIP)),
    "kimivl": KimiVLProcessor(14, 2, 16_384),
    "mistral3": PixtralProcessor(1540, 16, 1),
}
PHOTO = 3024, 4032  # 12 megapixels


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_large_photo_leaves_a_quarter_of_the_context_to_text(name) -> None:
    scaled = scaled_to_context(PROCESSORS[name], 4096)
    assert PROCESSORS[name].outline(*PHOTO).rows > 3072 or name == "mistral3"
    assert 2200 < scaled.outline(*PHOTO).rows <= 3072
    assert scaled.most_rows < PROCESSORS[name].most_rows


@pytest.mark.parametrize("name", PROCESSORS)
def test_an_image_that_fits_is_prepared_as_without_a_context(name) -> None:
    image = np.random.default_rng(1).integers(0, 256, (300, 700, 3), dtype=np.uint8)
    plain, scaled = PROCESSORS[name], scaled_to_context(PROCESSORS[name], 4096)
    assert scaled.outline(300, 700) == plain.outline(300, 700)
    assert torch.equal(scaled.pixels(image), plain.pixels(image))


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_context_for_the_largest_image_changes_nothing(name) -> None:
    plain = PROCESSORS[name]
    assert scaled_to_context(plain, 1 << 20) == plain == scaled_to_context(plain, None)


def test_images_keep_the_size_below_which_the_model_does_not_read_them() -> None:
    scaled = scaled_to_context(PROCESSORS["qwen3vl"], 32)
    assert scaled.max_pixels == scaled.min_pixels == 64 << 10
