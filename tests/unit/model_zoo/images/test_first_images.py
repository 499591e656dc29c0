"""The image that an encoder encodes at its start."""

import pytest

from model_zoo.images.normalise import CLIP
from model_zoo.images.prepared import ImageProcessor, outline_within
from model_zoo.images.slicing import Slicing
from model_zoo.models.deepseekocr.image_processor import DeepseekOCRProcessor
from model_zoo.models.gemma3.image_processor import Gemma3Processor
from model_zoo.models.idefics3.image_processor import Idefics3Processor
from model_zoo.models.internvl.image_processor import InternVLProcessor
from model_zoo.models.kimivl.image_processor import KimiVLProcessor
from model_zoo.models.minicpmv.image_processor import MiniCPMVProcessor
from model_zoo.models.mistral3.image_processor import PixtralProcessor
from model_zoo.multimodal.bounded_processor import BoundedProcessor

QWEN = BoundedProcessor(16, 2, 64 << 10, 16 << 20, CLIP)  # as files of Ollama state its bounds
# The most rows that an image of each may have, and those of the largest first image on a CPU.
PROCESSORS: dict[str, tuple[ImageProcessor, int, int]] = {
    "qwen3vl": (QWEN, 16_384, 72),
    "kimivl": (KimiVLProcessor(14, 2), 1_000, 64),
    "mistral3": (PixtralProcessor(1540, 14, 2), 3_000, 64),
    "internvl": (InternVLProcessor(448, 256, CLIP), 3_328, 256),  # one tile
    "idefics3": (Idefics3Processor(384, 1536, 81), 1_377, 5 * 81),  # four tiles and the whole
    "minicpmv": (MiniCPMVProcessor(Slicing(448, 14), 14, 64), 640, 64),
    "deepseekocr": (DeepseekOCRProcessor(1024, 640, 16), 1_183, 273),  # the whole image
    "gemma3": (Gemma3Processor(896, 256), 256, 256),  # its only size
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_first_image_is_the_largest_within_some_rows_or_else_the_smallest(name) -> None:
    processor, most, few = PROCESSORS[name]
    assert most <= outline_within(processor, 1 << 20).rows <= processor.most_rows
    assert outline_within(processor, 64).rows <= few
    assert outline_within(processor, few).rows >= few // 3
