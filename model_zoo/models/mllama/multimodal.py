"""Llama 3.2 Vision with images: tiles in a fixed number of slots."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import CLIP
from model_zoo.models.mllama.image_processor import MllamaProcessor
from model_zoo.models.mllama.placeholders import MllamaPlaceholders
from model_zoo.models.mllama.vision import MllamaTower
from model_zoo.multimodal.image_settings import read_normalisation
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.tokenizers.tokenizer import Tokenizer


def build_multimodal(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    tower = MllamaTower(w, metadata)
    slots, _, side, _ = tower.limits.largest.shape
    processor = MllamaProcessor(
        side,
        tower.limits.rows // slots,
        slots,
        normalisation=read_normalisation(metadata, CLIP),
    )
    return MultimodalSpec(tower, processor, MllamaPlaceholders(tokenizer, slots))
