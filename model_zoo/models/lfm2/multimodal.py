"""LFM2-VL and LFM2.5-VL with images: the whole image, and tiles of a large one."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import STANDARD
from model_zoo.images.resize import Filter
from model_zoo.layers.vision.vision_sizes import MAX_MERGED, MAX_SIDE, VisionSizes
from model_zoo.models.lfm2.image_processor import Lfm2Processor
from model_zoo.models.lfm2.placeholders import NAMED_SIDE, Lfm2Placeholders
from model_zoo.models.lfm2.vision import EPS, MERGED, Lfm2Tower
from model_zoo.multimodal.context_share import scaled_to_context
from model_zoo.multimodal.image_settings import read_normalisation
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.tokenizers.tokenizer import Tokenizer
from runtime.errors import UnsupportedModelError

MOST_ROWS = 1 << 16
MERGE_KEY, RESAMPLE_KEY = "vision.projector.scale_factor", "vision.image_resize_algo"
TILE_KEY, LEAST_TILES_KEY, MOST_TILES_KEY = (
    f"vision.{name}" for name in ("tile_size", "min_tiles", "max_tiles")
)
LEAST_ROWS_KEY, MOST_ROWS_KEY = "vision.min_image_tokens", "vision.max_image_tokens"
TOLERANCE_KEY = "vision.max_pixels_tolerance"
CUTS_KEY, THUMBNAIL_KEY = "vision.do_image_splitting", "vision.use_thumbnail"
MARKED_KEY = "vision.use_image_special_tokens"
# Values that llama.cpp's files mean: the defaults of Lfm2VlImageProcessor in `transformers`.
TILE, TILES, ROWS, TOLERANCE = 512, (2, 10), (64, 256), 2.0
MOST_TOLERANCE = 1024.0
FILTERS = {each.name.lower(): each for each in Filter}


def build_multimodal(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    processor = scaled_to_context(read_processor(metadata), w.context_tokens)
    tower = Lfm2Tower(w, metadata, processor)
    return MultimodalSpec(tower, processor, Lfm2Placeholders(tokenizer, processor))


def read_processor(metadata: Metadata) -> Lfm2Processor:
    if not metadata.get(MARKED_KEY, bool, True):
        raise UnsupportedModelError(
            f"{metadata.path}: `{metadata.full_key(MARKED_KEY)}` is false; only prompts "
            "with tokens around images and before tiles are supported."
        )
    sizes = VisionSizes.read(metadata, eps=EPS)
    merge = metadata.get_size(MERGE_KEY, MERGED, at_most=MAX_MERGED)
    rows, tiles = _pair(metadata, LEAST_ROWS_KEY, MOST_ROWS_KEY, ROWS, MOST_ROWS), _tiles(metadata)
    return Lfm2Processor(
        sizes.patch,
        merge,
        *rows,
        _tile(metadata, sizes.patch * merge),
        *tiles,
        _tolerance(metadata),
        metadata.get(THUMBNAIL_KEY, bool, True),
        _filter(metadata),
        read_normalisation(metadata, STANDARD),
    )


def _pair(
    metadata: Metadata, least: str, most: str, defaults: tuple[int, int], limit: int
) -> tuple[int, int]:
    low, high = (
        metadata.get_size(key, default, at_most=limit)
        for key, default in zip((least, most), defaults, strict=True)
    )
    if low > high:
        raise metadata.error(least, f"is {low:,}, more than `{metadata.full_key(most)}`, {high:,}")
    return low, high


def _tiles(metadata: Metadata) -> tuple[int, int]:
    """The least and the most tiles of an image that is cut; (1, 1) if none is cut."""
    if not metadata.get(CUTS_KEY, bool, True):
        return 1, 1
    least, most = _pair(metadata, LEAST_TILES_KEY, MOST_TILES_KEY, TILES, NAMED_SIDE)
    if least < 2 <= most:
        raise metadata.error(LEAST_TILES_KEY, "is 1; an image that is cut has several tiles")
    return least, most


def _tile(metadata: Metadata, unit: int) -> int:
    side = metadata.get_size(TILE_KEY, TILE, at_most=MAX_SIDE)
    if side % unit:
        raise metadata.error(TILE_KEY, f"is {side}, which is not a multiple of {unit}")
    return side


def _tolerance(metadata: Metadata) -> float:
    stated = metadata.get_positive(TOLERANCE_KEY, TOLERANCE)
    if stated > MOST_TOLERANCE:
        raise metadata.error(TOLERANCE_KEY, f"is {stated:g}; {MOST_TOLERANCE:g} is the limit")
    return stated


def _filter(metadata: Metadata) -> Filter:
    stated = metadata.get(RESAMPLE_KEY, str, "bilinear")
    if stated not in FILTERS:
        known = ", ".join(FILTERS)
        raise metadata.error(RESAMPLE_KEY, f"is {stated[:80]}; {known} are known")
    return FILTERS[stated]
