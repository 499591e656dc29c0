"""dots.ocr with images, which keep their aspect ratio within bounds of area."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import CLIP
from model_zoo.models.dots_ocr.placeholders import dots_placeholders
from model_zoo.models.dots_ocr.vision import MERGED_KEY, dots_tower
from model_zoo.multimodal.bounded_processor import BoundedProcessor
from model_zoo.multimodal.context_share import scaled_to_context
from model_zoo.multimodal.image_settings import CLIP_AREAS, read_areas
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.tokenizers.tokenizer import Tokenizer

# Those of the checkpoints, which llama.cpp's converter writes.
LEAST_PIXELS, MOST_PIXELS = 3_136, 11_289_600


def build_multimodal(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    processor = scaled_to_context(read_processor(metadata), w.context_tokens)
    tower = dots_tower(w, metadata, processor)
    return MultimodalSpec(tower, processor, dots_placeholders(tokenizer))


def read_processor(metadata: Metadata) -> BoundedProcessor:
    areas = read_areas(metadata, *CLIP_AREAS, defaults=(LEAST_PIXELS, MOST_PIXELS))
    return BoundedProcessor.read(metadata, areas, CLIP, merged_key=MERGED_KEY)
