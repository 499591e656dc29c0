"""Gemma 4 with images, which keep their aspect ratio within a budget of rows."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import UNCHANGED
from model_zoo.models.gemma4.image_processor import Gemma4Processor
from model_zoo.models.gemma4.placeholders import gemma4_placeholders
from model_zoo.models.gemma4.vision import Gemma4Tower
from model_zoo.models.gemma4.vision_unified import Gemma4UnifiedTower
from model_zoo.multimodal.image_settings import projector_type, read_normalisation
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.tokenizers.tokenizer import Tokenizer

UNIFIED = "gemma4uv"


def build_multimodal(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    tower = build_tower(w, metadata)
    processor = Gemma4Processor(
        metadata.require_size("vision.patch_size"),
        tower.pooled,
        tower.limits.rows,
        normalisation=read_normalisation(metadata, UNCHANGED),
    )
    return MultimodalSpec(tower, processor, gemma4_placeholders(tokenizer))


def build_tower(w: TensorScope, metadata: Metadata) -> Gemma4Tower | Gemma4UnifiedTower:
    """Builds it from a projector file or a combined file; audio tensors are ignored."""
    w.scope("a").ignore_all()
    w.scope("mm", "a").ignore_all()
    if projector_type(metadata) == UNIFIED:
        return Gemma4UnifiedTower(w, metadata)
    return Gemma4Tower(w, metadata)
