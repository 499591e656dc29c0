"""InternVL with images: tiles and the whole image."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import IMAGENET
from model_zoo.layers.vision.merging import shuffled_rows
from model_zoo.layers.vision.vision_sizes import VisionSizes
from model_zoo.models.internvl.image_processor import InternVLProcessor
from model_zoo.models.internvl.placeholders import internvl_placeholders
from model_zoo.models.internvl.vision import EPS, MOST_TILES, SHUFFLED, InternVLTower
from model_zoo.multimodal.context_share import scaled_to_context
from model_zoo.multimodal.image_settings import read_normalisation, read_tiles
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.tokenizers.tokenizer import Tokenizer


def build_multimodal(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    processor = scaled_to_context(read_processor(metadata), w.context_tokens)
    tower = InternVLTower(w, metadata, processor)
    return MultimodalSpec(tower, processor, internvl_placeholders(tokenizer))


def read_processor(metadata: Metadata) -> InternVLProcessor:
    sizes = VisionSizes.read(metadata, eps=EPS)
    least, most = read_tiles(metadata, defaults=(1, MOST_TILES))
    return InternVLProcessor(
        sizes.side(),
        shuffled_rows(metadata, sizes.side() // sizes.patch, SHUFFLED),
        read_normalisation(metadata, IMAGENET),
        min_tiles=least,
        max_tiles=most,
    )
