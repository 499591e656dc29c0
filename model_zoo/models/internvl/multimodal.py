"""InternVL with images: tiles and the whole image."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import IMAGENET
from model_zoo.layers.vision.merging import shuffled_rows
from model_zoo.layers.vision.vision_sizes import VisionSizes
from model_zoo.models.internvl.image_processor import InternVLProcessor
from model_zoo.models.internvl.placeholders import internvl_placeholders
from model_zoo.models.internvl.vision import (
    EPS,
    LEAST_TILES_KEY,
    MOST_TILES,
    MOST_TILES_KEY,
    SHUFFLED,
    InternVLTower,
)
from model_zoo.multimodal.context_share import scaled_to_context
from model_zoo.multimodal.image_settings import read_normalisation
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.tokenizers.tokenizer import Tokenizer

TILES_LIMIT = 128


def build_multimodal(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    processor = scaled_to_context(read_processor(metadata), w.context_tokens)
    tower = InternVLTower(w, metadata, processor)
    return MultimodalSpec(tower, processor, internvl_placeholders(tokenizer))


def read_processor(metadata: Metadata) -> InternVLProcessor:
    sizes = VisionSizes.read(metadata, eps=EPS)
    least, most = _tiles(metadata)
    return InternVLProcessor(
        sizes.side(),
        shuffled_rows(metadata, sizes.side() // sizes.patch, SHUFFLED),
        read_normalisation(metadata, IMAGENET),
        min_tiles=least,
        max_tiles=most,
    )


def _tiles(metadata: Metadata) -> tuple[int, int]:
    """Files older than the keys mean the defaults of the family's processors."""
    least = metadata.get_size(LEAST_TILES_KEY, 1, at_most=TILES_LIMIT)
    most = metadata.get_size(MOST_TILES_KEY, MOST_TILES, at_most=TILES_LIMIT)
    if least > most:
        full = metadata.full_key(MOST_TILES_KEY)
        raise metadata.error(LEAST_TILES_KEY, f"is {least}, more than `{full}`, {most}")
    return least, most
