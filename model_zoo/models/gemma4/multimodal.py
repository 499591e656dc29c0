"""Gemma 4 with images, which keep their aspect ratio within a budget of rows."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import UNCHANGED
from model_zoo.models.gemma4.image_processor import Gemma4Processor
from model_zoo.models.gemma4.placeholders import gemma4_placeholders
from model_zoo.models.gemma4.vision import build_tower
from model_zoo.multimodal.image_settings import read_normalisation
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.tokenizers.tokenizer import Tokenizer


def build_multimodal(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    tower = build_tower(w, metadata)
    processor = Gemma4Processor(
        metadata.require_size("vision.patch_size"),
        tower.pooled,
        tower.limits.rows,
        normalisation=read_normalisation(metadata, UNCHANGED),
    )
    return MultimodalSpec(tower, processor, gemma4_placeholders(tokenizer))
