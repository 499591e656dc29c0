"""Muse Glimmer with images."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import STANDARD
from model_zoo.layers.vision.vision_sizes import VisionSizes, merged_side
from model_zoo.models.muse_glimmer.image_processor import MuseProcessor
from model_zoo.models.muse_glimmer.placeholders import muse_placeholders
from model_zoo.models.muse_glimmer.vision import EPS, MuseTower
from model_zoo.multimodal.context_share import scaled_to_context
from model_zoo.multimodal.image_settings import read_normalisation
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.tokenizers.tokenizer import Tokenizer


def build_multimodal(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    processor = scaled_to_context(read_processor(metadata), w.context_tokens)
    tower = MuseTower(w, metadata, processor)
    return MultimodalSpec(tower, processor, muse_placeholders(tokenizer))


def read_processor(metadata: Metadata) -> MuseProcessor:
    """Converters state no number of rows; it is that of the checkpoint, as in llama.cpp."""
    unit = VisionSizes.read(metadata, eps=EPS).patch * merged_side(metadata)
    return MuseProcessor(unit, normalisation=read_normalisation(metadata, STANDARD))
