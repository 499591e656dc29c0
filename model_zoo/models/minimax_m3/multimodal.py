"""MiniMax M3 with images, which keep their aspect ratio within bounds of area."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import CLIP
from model_zoo.models.minimax_m3.placeholders import minimax_placeholders
from model_zoo.models.minimax_m3.vision import minimax_tower
from model_zoo.multimodal.bounded_processor import BoundedProcessor
from model_zoo.multimodal.context_share import scaled_to_context
from model_zoo.multimodal.image_settings import CLIP_AREAS, read_areas
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.tokenizers.tokenizer import Tokenizer

# Those of MiniMaxM3VLImageProcessor in `transformers`; converters state none.
LEAST_PIXELS, MOST_PIXELS = 4 * 28 * 28, 451_584


def build_multimodal(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    processor = scaled_to_context(read_processor(metadata), w.context_tokens)
    tower = minimax_tower(w, metadata, processor)
    return MultimodalSpec(tower, processor, minimax_placeholders(tokenizer))


def read_processor(metadata: Metadata) -> BoundedProcessor:
    areas = read_areas(metadata, *CLIP_AREAS, defaults=(LEAST_PIXELS, MOST_PIXELS))
    return BoundedProcessor.read(metadata, areas, CLIP)
