"""GLM-V models and GLM-OCR with images, which keep their aspect ratio within bounds of area."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.bounded_area import Growth
from model_zoo.images.normalise import CLIP
from model_zoo.models.glm4v.placeholders import glm_placeholders
from model_zoo.models.glm4v.vision import FRAMES, glm4v_tower, of_a_frame
from model_zoo.multimodal.bounded_processor import BoundedProcessor
from model_zoo.multimodal.context_share import scaled_to_context
from model_zoo.multimodal.image_settings import CLIP_AREAS, read_areas
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.tokenizers.tokenizer import Tokenizer

# Defaults for files without bounds, such as those of llama.cpp's converter. The minimum is that of
# every checkpoint, whose areas count both frames of a patch. Maxima differ: 4,816,896 in the
# checkpoints (6,144 rows), 5,880,000 in transformers where a checkpoint is silent, 4,096 rows
# (3,211,264) in llama.cpp's clip.cpp. All of them are more than the context that most
# configurations serve; 2 << 20 leaves room for text in a context of 4,096 tokens.
LEAST_PIXELS, MOST_PIXELS = 112 * 112 // 2, 2 << 20
OLLAMA_AREAS = "vision.min_pixels", "vision.max_pixels"


def build_multimodal(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    processor = scaled_to_context(read_processor(metadata), w.context_tokens)
    tower = glm4v_tower(w, metadata, processor)
    return MultimodalSpec(tower, processor, glm_placeholders(tokenizer))


def read_processor(metadata: Metadata) -> BoundedProcessor:
    """The processor. Like the checkpoints, Ollama's files state areas of all frames of a patch."""
    if metadata.architecture == "clip":
        areas = read_areas(metadata, *CLIP_AREAS, defaults=(LEAST_PIXELS, MOST_PIXELS))
    else:
        defaults = FRAMES * LEAST_PIXELS, FRAMES * MOST_PIXELS
        least, most = read_areas(metadata, *OLLAMA_AREAS, defaults=defaults)
        areas = of_a_frame(least), of_a_frame(most)
    return BoundedProcessor.read(metadata, areas, CLIP, grows=Growth.BOTH)
