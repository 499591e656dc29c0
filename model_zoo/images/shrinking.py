"""Smaller sizes of images whose parts would have too many rows of features."""

from collections.abc import Callable

from model_zoo.images.resize import MAX_ASPECT
from model_zoo.images.tiling import Size

STEP = 0.97


def shrunk(height: int, width: int, rows: Callable[[int, int], int], most: int | None) -> Size:
    """The size, or the largest of those tried with about the same aspect, of which an image has at
    most `most` rows (None: any number); 1 x 1 if there is none.

    rows: of an image with that height and width, at most `MAX_ASPECT` times as long as wide if the
    given size is.
    """
    size, scale = (height, width), 1.0
    while most is not None and size != (1, 1) and rows(*size) > most:
        scale *= STEP
        high, wide = (max(round(length * scale), 1) for length in (height, width))
        size = min(high, MAX_ASPECT * wide), min(wide, MAX_ASPECT * high)
    return size
