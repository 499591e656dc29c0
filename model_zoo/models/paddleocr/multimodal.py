"""PaddleOCR-VL with images, which keep their aspect ratio within bounds of area."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.bounded_area import Growth
from model_zoo.images.normalise import CLIP
from model_zoo.layers.vision.vision_sizes import MAX_MERGED, MAX_PATCH
from model_zoo.models.paddleocr.placeholders import paddle_placeholders
from model_zoo.models.paddleocr.vision import MERGED, PaddleTower
from model_zoo.multimodal.context_share import scaled_to_context
from model_zoo.multimodal.image_settings import read_areas, read_normalisation
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.multimodal.qwen_image_processor import QwenVLProcessor
from model_zoo.tokenizers.tokenizer import Tokenizer

AREAS = "vision.image_min_pixels", "vision.image_max_pixels"
# Those of the checkpoints, which llama.cpp's converter writes.
LEAST_PIXELS, MOST_PIXELS = 147_384, 2_822_400


def build_multimodal(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    processor = scaled_to_context(read_processor(metadata), w.context_tokens)
    tower = PaddleTower(w, metadata, processor)
    return MultimodalSpec(tower, processor, paddle_placeholders(tokenizer))


def read_processor(metadata: Metadata) -> QwenVLProcessor:
    least, most = read_areas(metadata, *AREAS, defaults=(LEAST_PIXELS, MOST_PIXELS))
    return QwenVLProcessor(
        patch=metadata.require_size("vision.patch_size", at_most=MAX_PATCH),
        merge=metadata.get_size("vision.spatial_merge_size", MERGED, at_most=MAX_MERGED),
        min_pixels=least,
        max_pixels=most,
        normalisation=read_normalisation(metadata, CLIP),
        grows=Growth.IN_TURN,
    )
