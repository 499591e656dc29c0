"""DeepSeek-OCR with images: tiles and the whole image."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import STANDARD
from model_zoo.models.deepseekocr.image_processor import DeepseekOCRProcessor
from model_zoo.models.deepseekocr.placeholders import deepseekocr_placeholders
from model_zoo.models.deepseekocr.sam import patches_across, sam_scope, sam_sizes
from model_zoo.models.deepseekocr.vision import DeepseekOCRTower
from model_zoo.multimodal.context_share import scaled_to_context
from model_zoo.multimodal.image_settings import read_normalisation
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.tokenizers.tokenizer import Tokenizer

# The side of a tile by that of the whole image: 640 of 1,024 pixels, which no file states.
TILE_SHARE = 5, 8


def build_multimodal(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    processor = scaled_to_context(read_processor(w, metadata), w.context_tokens)
    tower = DeepseekOCRTower(w, metadata, processor)
    return MultimodalSpec(tower, processor, deepseekocr_placeholders(tokenizer))


def read_processor(w: TensorScope, metadata: Metadata) -> DeepseekOCRProcessor:
    sam = sam_scope(w)
    sizes = sam_sizes(sam, metadata)
    across = patches_across(sam, sizes)
    tile = max(across * TILE_SHARE[0] // TILE_SHARE[1], 1)
    return DeepseekOCRProcessor(
        across * sizes.patch,
        tile * sizes.patch,
        sizes.patch,
        normalisation=read_normalisation(metadata, STANDARD),
    )
