"""Kimi-VL and Kimi K2.5 with images."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import STANDARD
from model_zoo.layers.vision.vision_sizes import MAX_MERGED, VisionSizes
from model_zoo.models.kimivl.image_processor import (
    MOST_ALONG_A_SIDE,
    MOST_PATCHES,
    KimiVLProcessor,
)
from model_zoo.models.kimivl.placeholders import K25_TEXTS, TEXTS, kimivl_placeholders
from model_zoo.models.kimivl.vision import EPS, KimiVLTower
from model_zoo.multimodal.context_share import scaled_to_context
from model_zoo.multimodal.image_settings import MOST_PIXELS, projector_type, read_normalisation
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.tokenizers.tokenizer import Tokenizer

MERGED = 2
AREA_KEY = "vision.image_max_pixels"
K25 = "kimik25"


def build_multimodal(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    processor = scaled_to_context(read_processor(metadata), w.context_tokens)
    is_k25 = projector_type(metadata) == K25
    tower = KimiVLTower(w, metadata, processor, apart=is_k25)
    placeholders = kimivl_placeholders(tokenizer, K25_TEXTS if is_k25 else TEXTS)
    return MultimodalSpec(tower, processor, placeholders)


def read_processor(metadata: Metadata) -> KimiVLProcessor:
    """Converters state no number of patches; it is then that of the first checkpoints, as in
    llama.cpp."""
    sizes = VisionSizes.read(metadata, eps=EPS)
    merge = metadata.get_size("vision.projector.scale_factor", MERGED, at_most=MAX_MERGED)
    normalisation = read_normalisation(metadata, STANDARD)
    area = metadata.get_size(AREA_KEY, MOST_PATCHES * sizes.patch**2, at_most=MOST_PIXELS)
    side = MOST_ALONG_A_SIDE if projector_type(metadata) == K25 else None
    return KimiVLProcessor(sizes.patch, merge, max(area // sizes.patch**2, 1), side, normalisation)
