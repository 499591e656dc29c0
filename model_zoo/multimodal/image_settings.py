"""Metadata keys of projectors and of image processing that all families share."""

from math import isfinite

from model_zoo.gguf.metadata import Metadata
from model_zoo.images.normalise import Normalisation, Triple

MOST_PIXELS = 1 << 26
LEAST_TILES_KEY, MOST_TILES_KEY = "vision.preproc_min_tiles", "vision.preproc_max_tiles"
TILES_LIMIT = 128
# Bounds of area in projector files.
CLIP_AREAS = "vision.image_min_pixels", "vision.image_max_pixels"


def projector_type(metadata: Metadata) -> str:
    """The type that a projector file states; the oldest ones state none."""
    own = metadata.get("vision.projector_type", str)  # in files for images and other media
    return own or metadata.get("projector_type", str, "mlp")


def read_normalisation(metadata: Metadata, default: Normalisation) -> Normalisation:
    """Mean and deviation of each colour; `default` where the file states none."""
    mean = _triple(metadata, "vision.image_mean", default.mean)
    std = _triple(metadata, "vision.image_std", default.std)
    if not all(0 <= value <= 1 for value in mean):
        raise metadata.error("vision.image_mean", f"is {list(mean)}; all must be from 0 to 1")
    if not all(value > 0 for value in std):
        raise metadata.error("vision.image_std", f"is {list(std)}; all must be above 0")
    return Normalisation(mean, std)


def read_areas(
    metadata: Metadata, least: str, most: str, *, defaults: tuple[int, int]
) -> tuple[int, int]:
    """Bounds of the area in pixels of images that keep their aspect ratio, from the keys `least`
    and `most`.

    If the file states only one bound, the other's default is adjusted to it.
    """
    low, high = (
        metadata.get_size(key, default, at_most=MOST_PIXELS)
        for key, default in zip((least, most), defaults, strict=True)
    )
    if not metadata.has(least):
        return min(low, high), high
    if not metadata.has(most):
        return low, max(low, high)
    if low > high:
        raise metadata.error(least, f"is {low:,}, more than `{metadata.full_key(most)}`, {high:,}")
    return low, high


def read_tiles(metadata: Metadata, *, defaults: tuple[int, int]) -> tuple[int, int]:
    """The minimum and maximum of tiles per image, without the whole image. defaults: for files
    older than the keys."""
    least, most = (
        metadata.get_size(key, default, at_most=TILES_LIMIT)
        for key, default in zip((LEAST_TILES_KEY, MOST_TILES_KEY), defaults, strict=True)
    )
    if least > most:
        full = metadata.full_key(MOST_TILES_KEY)
        raise metadata.error(LEAST_TILES_KEY, f"is {least}, more than `{full}`, {most}")
    return least, most


def _triple(metadata: Metadata, key: str, default: Triple) -> Triple:
    stated = metadata.get_array(key, float)
    if stated is None:
        return default
    if len(stated) != len(default) or not all(map(isfinite, stated)):
        raise metadata.error(key, f"is {list(stated)[:8]}, not a number for each of three colours")
    red, green, blue = stated
    return red, green, blue
