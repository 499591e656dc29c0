"""GLM-V models and GLM-OCR with images, which keep their aspect ratio within bounds of area."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.bounded_area import Growth
from model_zoo.images.normalise import CLIP
from model_zoo.layers.vision.vision_sizes import MAX_MERGED, MAX_PATCH
from model_zoo.models.glm4v.placeholders import glm_placeholders
from model_zoo.models.glm4v.vision import FRAMES, MERGED, GlmTower, of_a_frame
from model_zoo.multimodal.context_share import scaled_to_context
from model_zoo.multimodal.image_settings import read_areas, read_normalisation
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.multimodal.qwen_image_processor import QwenVLProcessor
from model_zoo.tokenizers.tokenizer import Tokenizer

# Defaults for files without bounds, such as those of llama.cpp's converter. The minimum is that of
# every checkpoint, whose areas count both frames of a patch. Maxima differ: 4,816,896 in the
# checkpoints (6,144 rows), 5,880,000 in transformers where a checkpoint is silent, 4,096 rows
# (3,211,264) in llama.cpp's clip.cpp. All of them are more than the context that most
# configurations serve; 2 << 20 leaves room for text in a context of 4,096 tokens.
LEAST_PIXELS, MOST_PIXELS = 112 * 112 // 2, 2 << 20
CLIP_KEYS = "vision.image_min_pixels", "vision.image_max_pixels"
OLLAMA_KEYS = "vision.min_pixels", "vision.max_pixels"


def build_multimodal(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    processor = scaled_to_context(read_processor(metadata), w.context_tokens)
    tower = GlmTower(w, metadata, processor)
    return MultimodalSpec(tower, processor, glm_placeholders(tokenizer))


def read_processor(metadata: Metadata) -> QwenVLProcessor:
    """The processor. Like the checkpoints, Ollama's files state areas of all frames of a patch."""
    if metadata.architecture == "clip":
        least, most = read_areas(metadata, *CLIP_KEYS, defaults=(LEAST_PIXELS, MOST_PIXELS))
    else:
        defaults = FRAMES * LEAST_PIXELS, FRAMES * MOST_PIXELS
        areas = read_areas(metadata, *OLLAMA_KEYS, defaults=defaults)
        least, most = (of_a_frame(area) for area in areas)
    return QwenVLProcessor(
        patch=metadata.require_size("vision.patch_size", at_most=MAX_PATCH),
        merge=metadata.get_size("vision.spatial_merge_size", MERGED, at_most=MAX_MERGED),
        min_pixels=least,
        max_pixels=most,
        normalisation=read_normalisation(metadata, CLIP),
        grows=Growth.BOTH,
    )
