"""Qwen2.5-VL and EXAONE 4.5 with images, which keep their aspect ratio within bounds of area."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import CLIP
from model_zoo.models.qwen25vl.placeholders import exaone_placeholders
from model_zoo.models.qwen25vl.vision import Qwen25VLTower
from model_zoo.multimodal.bounded_processor import BoundedProcessor
from model_zoo.multimodal.context_share import scaled_to_context
from model_zoo.multimodal.image_settings import CLIP_AREAS, projector_type, read_areas
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.multimodal.qwen_placeholders import qwen_placeholders
from model_zoo.tokenizers.tokenizer import Tokenizer

EXAONE = "exaone4_5"
PATCH = 14
# Defaults for files without bounds, as most are: neither llama.cpp's nor Ollama's converter
# writes them. The minimum is that of every checkpoint and of `Qwen2VLImageProcessor` in
# transformers. Maxima differ: 12,845,056 in the checkpoints (16,384 rows, more than the context
# that most configurations serve), 1,003,520 in transformers where a checkpoint is silent, 4,096
# rows (3,211,264) in llama.cpp's clip.cpp, 1,003,520 and later 2 << 20 in Ollama's
# process_image.go. The last leaves room for text in a context of 4,096 tokens.
LEAST_PIXELS, MOST_PIXELS = 56 * 56, 2 << 20
OLLAMA_AREAS = "vision.min_pixels", "vision.max_pixels"


def build_multimodal(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    processor = scaled_to_context(read_processor(metadata), w.context_tokens)
    tower = Qwen25VLTower(w, metadata, processor)
    is_exaone = metadata.architecture == "clip" and projector_type(metadata) == EXAONE
    placeholders = (exaone_placeholders if is_exaone else qwen_placeholders)(tokenizer)
    return MultimodalSpec(tower, processor, placeholders)


def read_processor(metadata: Metadata) -> BoundedProcessor:
    keys = CLIP_AREAS if metadata.architecture == "clip" else OLLAMA_AREAS
    areas = read_areas(metadata, *keys, defaults=(LEAST_PIXELS, MOST_PIXELS))
    return BoundedProcessor.read(metadata, areas, CLIP, patch=PATCH)
