"""Step 3 VL with images: windows and the whole image."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import CLIP
from model_zoo.layers.vision.vision_sizes import VisionSizes
from model_zoo.models.step3vl.image_processor import MERGED, Step3VLProcessor, tile_side
from model_zoo.models.step3vl.placeholders import Step3VLPlaceholders
from model_zoo.models.step3vl.vision import (
    EDGE_KEY,
    EPS,
    LONGEST_EDGE,
    MERGED_KEY,
    Step3VLTower,
)
from model_zoo.multimodal.context_share import scaled_to_context
from model_zoo.multimodal.image_settings import read_normalisation
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.tokenizers.tokenizer import Tokenizer


def build_multimodal(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    processor = scaled_to_context(read_processor(metadata), w.context_tokens)
    tower = Step3VLTower(w, metadata, processor)
    return MultimodalSpec(tower, processor, Step3VLPlaceholders(tokenizer, processor))


def read_processor(metadata: Metadata) -> Step3VLProcessor:
    sizes = VisionSizes.read(metadata, eps=EPS)
    merged = metadata.get_size(MERGED_KEY, MERGED)
    if merged != MERGED:
        raise metadata.error(
            MERGED_KEY, f"is {merged}; it must be {MERGED}, as two convolutions merge so many"
        )
    side, unit = sizes.side(), MERGED * sizes.patch
    if side % unit:
        raise metadata.error("vision.image_size", f"is {side}; it must be a multiple of {unit}")
    return Step3VLProcessor(
        side,
        tile_side(side, sizes.patch),
        sizes.patch,
        metadata.get_size(EDGE_KEY, LONGEST_EDGE, at_most=1 << 16),
        read_normalisation(metadata, CLIP),
    )
