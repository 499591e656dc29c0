"""Llama 4 with images: tiles and the whole image."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import STANDARD
from model_zoo.models.llama4.image_processor import Llama4Processor
from model_zoo.models.llama4.placeholders import Llama4Placeholders
from model_zoo.models.llama4.vision import Llama4Tower
from model_zoo.multimodal.image_settings import read_normalisation
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.tokenizers.tokenizer import Tokenizer


def build_multimodal(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    tower = Llama4Tower(w, metadata)
    tiles, _, side, _ = tower.limits.largest.shape
    processor = Llama4Processor(
        side,
        tower.limits.rows // tiles,
        normalisation=read_normalisation(metadata, STANDARD),
    )
    return MultimodalSpec(tower, processor, Llama4Placeholders(tokenizer))
