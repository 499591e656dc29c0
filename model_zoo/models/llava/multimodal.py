"""LLaVA with images: one square, and tiles since 1.6 and in Granite Vision; Moondream."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import CLIP
from model_zoo.layers.vision.vision_sizes import VisionSizes
from model_zoo.models.llava import vision_next as llava_next
from model_zoo.models.llava.image_processor import Fit, LlavaProcessor
from model_zoo.models.llava.image_processor_next import LlavaNextProcessor
from model_zoo.models.llava.placeholders import llava_placeholders, moondream_placeholders
from model_zoo.models.llava.vision import (
    ASPECT_KEY,
    EPS,
    MIDDLE,
    PADDED,
    LlavaTower,
    is_moondream,
)
from model_zoo.multimodal.context_share import scaled_to_context
from model_zoo.multimodal.image_settings import read_normalisation
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.tokenizers.tokenizer import Tokenizer
from runtime.errors import UnsupportedModelError


def build_multimodal(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    if llava_next.has_tiles(metadata):
        return _with_tiles(w, metadata, tokenizer)
    tower = LlavaTower(w, metadata)
    of_moondream = is_moondream(w)
    processor = LlavaProcessor(
        tower.limits.largest.shape[-1],
        tower.limits.rows,
        fit=Fit.STRETCHED if of_moondream else _fit(metadata),
        normalisation=read_normalisation(metadata, CLIP),
    )
    placeholders = moondream_placeholders if of_moondream else llava_placeholders
    return MultimodalSpec(tower, processor, placeholders(tokenizer))


def _with_tiles(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    processor = scaled_to_context(read_next_processor(metadata), w.context_tokens)
    tower = llava_next.LlavaNextTower(w, metadata, processor)
    return MultimodalSpec(tower, processor, llava_placeholders(tokenizer))


def read_next_processor(metadata: Metadata) -> LlavaNextProcessor:
    sizes = VisionSizes.read(metadata, eps=EPS)
    side = sizes.side()
    return LlavaNextProcessor(
        side,
        side // sizes.patch,
        llava_next.read_canvases(metadata, side),
        normalisation=read_normalisation(metadata, CLIP),
    )


def _fit(metadata: Metadata) -> Fit:
    """Padded by default, as in the software of LLaVA's authors."""
    stated = metadata.get(ASPECT_KEY, str, PADDED)
    if stated not in (PADDED, MIDDLE):
        raise UnsupportedModelError(
            f"{metadata.path}: `{metadata.full_key(ASPECT_KEY)}` is {stated[:80]}, "
            f"which is not supported without tiles; {PADDED} and {MIDDLE} are."
        )
    return Fit.PADDED if stated == PADDED else Fit.CROPPED
