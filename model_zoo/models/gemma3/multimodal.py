"""Gemma 3 with images: every image is stretched to one square."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import STANDARD
from model_zoo.models.gemma3.image_processor import Gemma3Processor
from model_zoo.models.gemma3.placeholders import gemma3_placeholders
from model_zoo.models.gemma3.vision import Gemma3Tower
from model_zoo.multimodal.image_settings import read_normalisation
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.tokenizers.tokenizer import Tokenizer


def build_multimodal(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    tower = Gemma3Tower(w, metadata)
    side = tower.limits.largest.shape[-1]
    normalisation = read_normalisation(metadata, STANDARD)
    processor = Gemma3Processor(side, tower.limits.rows, normalisation=normalisation)
    return MultimodalSpec(tower, processor, gemma3_placeholders(tokenizer))
