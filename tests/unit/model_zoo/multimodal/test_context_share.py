"""Images are scaled down, or cut into fewer parts, to what the served context can hold."""

import numpy as np
import pytest
import torch

from model_zoo.images.normalise import CLIP
from model_zoo.images.slicing import Slicing
from model_zoo.models.deepseekocr.image_processor import DeepseekOCRProcessor
from model_zoo.models.hunyuan.image_processor import HunyuanProcessor
from model_zoo.models.idefics3.image_processor import Idefics3Processor
from model_zoo.models.internvl.image_processor import InternVLProcessor
from model_zoo.models.kimivl.image_processor import KimiVLProcessor
from model_zoo.models.lfm2.image_processor import Lfm2Processor
from model_zoo.models.llama4.image_processor import Llama4Processor
from model_zoo.models.llava.image_processor_next import LlavaNextProcessor
from model_zoo.models.minicpmv.image_processor import MiniCPMVProcessor
from model_zoo.models.mistral3.image_processor import PixtralProcessor
from model_zoo.models.muse_glimmer.image_processor import MuseProcessor
from model_zoo.models.step3vl.image_processor import Step3VLProcessor
from model_zoo.multimodal.bounded_processor import BoundedProcessor
from model_zoo.multimodal.context_share import ScalableProcessor, scaled_to_context

# The canvases of Granite Vision 3, in tiles.
TILES = [(1, n) for n in range(1, 11)] + [(n, 1) for n in range(2, 11)]
TILES += [(2, n) for n in range(2, 6)] + [(n, 2) for n in range(3, 6)] + [(3, 3)]
CANVASES = tuple((384 * rows, 384 * columns) for rows, columns in TILES)
# For each, the context and the least rows that a photo then keeps.
PROCESSORS: dict[str, tuple[ScalableProcessor, int, int]] = {
    "qwen3vl": (BoundedProcessor(16, 2, 64 << 10, 16 << 20, CLIP), 4096, 2200),
    "deepseekocr": (DeepseekOCRProcessor(1024, 640, 16), 1024, 600),
    "hunyuan": (
        HunyuanProcessor(BoundedProcessor(16, 2, 512 * 512, 16 << 20, CLIP)),
        4096,
        2200,
    ),
    "kimivl": (KimiVLProcessor(14, 2, 16_384), 4096, 2200),
    "mistral3": (PixtralProcessor(1540, 16, 1), 4096, 2200),
    "muse_glimmer": (MuseProcessor(28), 4096, 2200),
    "idefics3": (Idefics3Processor(364, 1820, 169), 4096, 2000),  # 4 x 3 and the whole
    "internvl": (InternVLProcessor(448, 256, CLIP), 2048, 1200),
    "lfm2": (Lfm2Processor(16, 2, 64, 256, 512, 2, 10, tolerance=2.0), 2048, 1000),
    "llama4": (Llama4Processor(336, 144), 2048, 1200),
    "llava_next": (LlavaNextProcessor(384, 27, CANVASES), 4096, 2800),
    "minicpmv": (MiniCPMVProcessor(Slicing(448, 14), 14, 64), 512, 300),
    "step3vl": (Step3VLProcessor(728, 504, 14), 2048, 1200),
    "minicpmv46": (MiniCPMVProcessor(Slicing(448, 56), 14, None), 512, 300),
}
PHOTO = 3024, 4032  # 12 megapixels


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_large_photo_leaves_a_quarter_of_the_context_to_text(name) -> None:
    plain, context, least = PROCESSORS[name]
    scaled, most = scaled_to_context(plain, context), context - context // 4
    assert plain.outline(*PHOTO).rows > most
    assert least < scaled.outline(*PHOTO).rows <= most
    assert scaled.most_rows < plain.most_rows


@pytest.mark.parametrize("name", PROCESSORS)
def test_an_image_that_fits_is_prepared_as_without_a_context(name) -> None:
    image = np.random.default_rng(1).integers(0, 256, (300, 600, 3), dtype=np.uint8)
    plain, context, _ = PROCESSORS[name]
    scaled = scaled_to_context(plain, context)
    assert plain.outline(300, 600).rows <= context - context // 4
    assert scaled != plain and scaled.outline(300, 600) == plain.outline(300, 600)
    assert torch.equal(scaled.pixels(image), plain.pixels(image))


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_context_for_the_largest_image_changes_nothing(name) -> None:
    plain, _, _ = PROCESSORS[name]
    assert scaled_to_context(plain, 1 << 20) == plain == scaled_to_context(plain, None)


@pytest.mark.parametrize("name", PROCESSORS)
def test_pixels_of_a_scaled_image_have_the_shape_that_its_size_states(name) -> None:
    image = np.random.default_rng(1).integers(0, 256, (900, 1200, 3), dtype=np.uint8)
    scaled = scaled_to_context(PROCESSORS[name][0], 400)
    assert scaled.pixels(image).shape == scaled.outline(900, 1200).shape


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("deepseekocr", 273),
        ("internvl", 256),
        ("llama4", 144),
        ("idefics3", 169),
        ("minicpmv", 64),
        ("lfm2", 256),
    ],
)
def test_the_smallest_context_leaves_one_part(name, least) -> None:
    scaled = scaled_to_context(PROCESSORS[name][0], 8)
    assert 0.9 * least < scaled.outline(*PHOTO).rows <= least


def test_a_tiled_image_in_the_smallest_context_is_on_the_smallest_canvas() -> None:
    scaled = scaled_to_context(PROCESSORS["llava_next"][0], 8)
    assert scaled.outline(*PHOTO).shape == (2, 3, 384, 384)


def test_an_image_is_cut_into_as_few_tiles_as_the_file_permits() -> None:
    scaled = scaled_to_context(InternVLProcessor(448, 256, CLIP, min_tiles=4), 1024)
    assert (scaled.min_tiles, scaled.max_tiles) == (4, 4)


def test_images_keep_the_size_below_which_the_model_does_not_read_them() -> None:
    scaled = scaled_to_context(PROCESSORS["qwen3vl"][0], 32)
    assert scaled.max_pixels == scaled.min_pixels == 64 << 10
