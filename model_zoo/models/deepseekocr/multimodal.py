"""DeepSeek-OCR and DeepSeek-OCR 2 with images: tiles and the whole image."""

from dataclasses import replace

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import STANDARD
from model_zoo.models.deepseekocr.image_processor import DeepseekOCRProcessor
from model_zoo.models.deepseekocr.placeholders import deepseekocr_placeholders
from model_zoo.models.deepseekocr.sam import patches_across, sam_scope, sam_sizes
from model_zoo.models.deepseekocr.vision import TILES, DeepseekOCRTower
from model_zoo.models.deepseekocr.vision_2 import SECOND_TILES, DeepseekOCR2Tower, queries_of
from model_zoo.multimodal.context_share import scaled_to_context
from model_zoo.multimodal.image_settings import (
    projector_type,
    read_normalisation,
    read_tiles,
)
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.tokenizers.tokenizer import Tokenizer

SECOND = "deepseekocr2"
# The side of a tile, which no file states, relative to that of the whole image (1,024 pixels): 640
# pixels in the first model, 768 in the second.
SHARE, SECOND_SHARE = (5, 8), (3, 4)


def build_multimodal(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    is_second = projector_type(metadata) == SECOND
    read = read_second_processor if is_second else read_processor
    processor = scaled_to_context(read(w, metadata), w.context_tokens)
    tower = (DeepseekOCR2Tower if is_second else DeepseekOCRTower)(w, metadata, processor)
    return MultimodalSpec(tower, processor, deepseekocr_placeholders(tokenizer))


def read_processor(
    w: TensorScope,
    metadata: Metadata,
    share: tuple[int, int] = SHARE,
    tiles: tuple[int, int] = TILES,
) -> DeepseekOCRProcessor:
    """tiles: the minimum and maximum per image, if the file states none."""
    sam = sam_scope(w)
    sizes = sam_sizes(sam, metadata)
    across = patches_across(sam, sizes)
    tile = max(across * share[0] // share[1], 1)
    least, most = read_tiles(metadata, defaults=tiles)
    return DeepseekOCRProcessor(
        across * sizes.patch,
        tile * sizes.patch,
        sizes.patch,
        normalisation=read_normalisation(metadata, STANDARD),
        min_tiles=least,
        max_tiles=most,
    )


def read_second_processor(w: TensorScope, metadata: Metadata) -> DeepseekOCRProcessor:
    plain = read_processor(w, metadata, SECOND_SHARE, SECOND_TILES)
    return replace(plain, queries=queries_of(w.scope("v")))
