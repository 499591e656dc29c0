"""MiniCPM-V 2.5 to 4.6 with images: an overview and slices."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import STANDARD
from model_zoo.images.slicing import Slicing
from model_zoo.layers.vision.vision_sizes import VisionSizes
from model_zoo.models.minicpmv.image_processor import MiniCPMVProcessor
from model_zoo.models.minicpmv.placeholders import MiniCPMVPlaceholders, minicpmv46_placeholders
from model_zoo.models.minicpmv.vision import EPS, MiniCPMVTower
from model_zoo.models.minicpmv.vision_v4_6 import SQUARE, MiniCPMV46Tower
from model_zoo.multimodal.context_share import scaled_to_context
from model_zoo.multimodal.image_settings import projector_type, read_normalisation
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.tokenizers.tokenizer import Tokenizer
from runtime.errors import UnsupportedModelError

MERGED, VERSION_KEY = "minicpmv4_6", "minicpmv_version"
# MiniCPM-V 2.5, and those after it, which differ in nothing that files do not state otherwise.
FIRST, VERSIONS = 2, (2, 3, 4, 5, 6, 100045)


def build_multimodal(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    if projector_type(metadata) == MERGED:
        return _build_merged(w, metadata, tokenizer)
    version = _version(metadata)
    processor = scaled_to_context(read_processor(w, metadata), w.context_tokens)
    tower = MiniCPMVTower(w, metadata, processor)
    enclosed = version == FIRST
    placeholders = MiniCPMVPlaceholders(tokenizer, processor, enclosed=enclosed)
    return MultimodalSpec(tower, processor, placeholders)


def _build_merged(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    processor = scaled_to_context(read_merged_processor(metadata), w.context_tokens)
    tower = MiniCPMV46Tower(w, metadata, processor)
    return MultimodalSpec(tower, processor, minicpmv46_placeholders(tokenizer, processor))


def read_merged_processor(metadata: Metadata) -> MiniCPMVProcessor:
    """Of MiniCPM-V 4.6, whose parts have a row for each square of merged patches."""
    sizes = VisionSizes.read(metadata, eps=EPS)
    slicing = Slicing(sizes.side(), sizes.patch * SQUARE)
    normalisation = read_normalisation(metadata, STANDARD)
    return MiniCPMVProcessor(slicing, sizes.patch, None, normalisation)


def read_processor(w: TensorScope, metadata: Metadata) -> MiniCPMVProcessor:
    """The number of feature rows of a part is that of the resampler's queries."""
    sizes = VisionSizes.read(metadata, eps=EPS)
    queries = (w.shape("resampler.query", whole=True) or (1,))[0]
    normalisation = read_normalisation(metadata, STANDARD)
    return MiniCPMVProcessor(
        Slicing(sizes.side(), sizes.patch), sizes.patch, queries, normalisation
    )


def _version(metadata: Metadata) -> int:
    """Files older than the key are of the first version, as in llama.cpp."""
    version = metadata.get(VERSION_KEY, int, FIRST)
    if version not in VERSIONS:
        known = ", ".join(map(str, VERSIONS))
        raise UnsupportedModelError(
            f"{metadata.path}: `{metadata.full_key(VERSION_KEY)}` is {version}, which is not "
            f"supported; supported are: {known}."
        )
    return version
