"""Mistral Small 3.1, Pixtral and LightOnOCR with images, which keep their aspect ratio."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import CLIP
from model_zoo.models.mistral3.image_processor import PixtralProcessor
from model_zoo.models.mistral3.placeholders import LightOnPlaceholders, PixtralPlaceholders
from model_zoo.models.mistral3.vision import EDGE_KEY, LIGHTON, SIDE, PixtralTower
from model_zoo.multimodal.image_settings import projector_type, read_normalisation
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.tokenizers.tokenizer import Tokenizer


def build_multimodal(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    tower = PixtralTower(w, metadata)
    rows, _ = tower.largest().grid
    patch = metadata.require_size("vision.patch_size")
    processor = PixtralProcessor(
        metadata.get_size(EDGE_KEY, metadata.get_size("vision.image_size", SIDE)),
        patch,
        tower.largest().pixels.shape[-1] // (rows * patch),
        normalisation=read_normalisation(metadata, CLIP),
    )
    lighton = projector_type(metadata) == LIGHTON
    placeholders = LightOnPlaceholders(tokenizer) if lighton else PixtralPlaceholders(tokenizer)
    return MultimodalSpec(tower, processor, placeholders)
