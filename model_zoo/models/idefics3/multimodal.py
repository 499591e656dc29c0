"""Idefics 3 and SmolVLM with images: tiles and the whole image."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import STANDARD
from model_zoo.layers.vision.merging import shuffled_rows
from model_zoo.layers.vision.vision_sizes import VisionSizes
from model_zoo.models.idefics3.image_processor import Idefics3Processor
from model_zoo.models.idefics3.placeholders import Idefics3Placeholders
from model_zoo.models.idefics3.vision import EDGE_KEY, EPS, SHUFFLED, Idefics3Tower
from model_zoo.multimodal.context_share import scaled_to_context
from model_zoo.multimodal.image_settings import read_normalisation
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.tokenizers.tokenizer import Tokenizer

EDGE_TILES = 4


def build_multimodal(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    processor = scaled_to_context(read_processor(metadata), w.context_tokens)
    tower = Idefics3Tower(w, metadata, processor)
    return MultimodalSpec(tower, processor, Idefics3Placeholders(tokenizer))


def read_processor(metadata: Metadata) -> Idefics3Processor:
    sizes = VisionSizes.read(metadata, eps=EPS)
    return Idefics3Processor(
        sizes.side(),
        _longest_edge(metadata, sizes.side()),
        shuffled_rows(metadata, sizes.side() // sizes.patch, SHUFFLED),
        normalisation=read_normalisation(metadata, STANDARD),
    )


def _longest_edge(metadata: Metadata, side: int) -> int:
    """The edge in pixels. Files older than the key mean four tiles, as the processors of all
    published checkpoints do."""
    return metadata.get_size(EDGE_KEY, EDGE_TILES * side, at_most=1 << 16)
