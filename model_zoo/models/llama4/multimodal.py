"""Llama 4 with images: tiles and the whole image."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import STANDARD
from model_zoo.models.llama4.image_processor import Llama4Processor
from model_zoo.models.llama4.placeholders import Llama4Placeholders
from model_zoo.models.llama4.vision import SIDE, Llama4Tower, read_shuffled, read_sizes
from model_zoo.multimodal.context_share import scaled_to_context
from model_zoo.multimodal.image_settings import read_normalisation
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.tokenizers.tokenizer import Tokenizer


def build_multimodal(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    processor = scaled_to_context(read_processor(metadata), w.context_tokens)
    tower = Llama4Tower(w, metadata, processor)
    return MultimodalSpec(tower, processor, Llama4Placeholders(tokenizer))


def read_processor(metadata: Metadata) -> Llama4Processor:
    sizes = read_sizes(metadata)
    side = sizes.side(SIDE)
    across = side // sizes.patch
    rows = (across // read_shuffled(metadata, across)) ** 2
    return Llama4Processor(side, rows, normalisation=read_normalisation(metadata, STANDARD))
