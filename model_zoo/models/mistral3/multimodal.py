"""Mistral Small 3.1, Pixtral and LightOnOCR with images, which keep their aspect ratio."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import CLIP
from model_zoo.layers.vision.vision_sizes import MAX_SIDE, VisionSizes
from model_zoo.models.mistral3.image_processor import PixtralProcessor
from model_zoo.models.mistral3.placeholders import PixtralPlaceholders, lighton_placeholders
from model_zoo.models.mistral3.vision import EDGE_KEY, EPS, LIGHTON, SIDE, PixtralTower, read_merge
from model_zoo.multimodal.context_share import scaled_to_context
from model_zoo.multimodal.image_settings import projector_type, read_normalisation
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.tokenizers.tokenizer import Tokenizer


def build_multimodal(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    processor = scaled_to_context(read_processor(metadata), w.context_tokens)
    tower = PixtralTower(w, metadata, processor)
    lighton = projector_type(metadata) == LIGHTON
    placeholders = lighton_placeholders(tokenizer) if lighton else PixtralPlaceholders(tokenizer)
    return MultimodalSpec(tower, processor, placeholders)


def read_processor(metadata: Metadata) -> PixtralProcessor:
    sizes = VisionSizes.read(metadata, eps=EPS)
    return PixtralProcessor(
        metadata.get_size(EDGE_KEY, sizes.side(SIDE), at_most=MAX_SIDE),
        sizes.patch,
        read_merge(metadata),
        normalisation=read_normalisation(metadata, CLIP),
    )
