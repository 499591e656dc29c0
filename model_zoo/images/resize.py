"""Resizing of 8-bit pixels with Pillow's separable filters, within bounds of memory."""

from enum import Enum

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from runtime.errors import RequestError

Pixels = NDArray[np.uint8]  # [height, width, 3]

MAX_ASPECT = 200  # ratio of the longer side to the shorter one
MAX_BETWEEN_PIXELS = 2**26  # size of the intermediate image: resized columns, original rows
MAX_SQUARED_SIDE = 2**14
BAND_PIXELS = 2**22


class Filter(Enum):
    BILINEAR = Image.Resampling.BILINEAR
    BICUBIC = Image.Resampling.BICUBIC
    LANCZOS = Image.Resampling.LANCZOS


def resized(image: Pixels, height: int, width: int, resample: Filter) -> Pixels:
    """image [rows, columns, 3] -> [height, width, 3]; the aspect may change.

    Raises RequestError if the image is so tall that the intermediate image would be too large.
    """
    if image.shape[:2] == (height, width):
        return image
    rows, columns, _ = image.shape
    if rows * width > MAX_BETWEEN_PIXELS:
        raise unsuitable(rows, columns, f"at most {MAX_BETWEEN_PIXELS // width:,} pixels high")
    return np.asarray(Image.fromarray(image).resize((width, height), resample.value))


def squared(image: Pixels, side: int, resample: Filter, colour: tuple[int, int, int]) -> Pixels:
    """image [rows, columns, 3], centred on a square of `colour`, resized to [side, side, 3].

    Equal to padding followed by resizing, but without allocating the square of a long image:
    columns are resized before rows, so bands of rows are padded and narrowed one by one. Raises
    RequestError for an image longer than `MAX_SQUARED_SIDE`.
    """
    rows, columns, _ = image.shape
    whole = max(rows, columns)
    if whole > MAX_SQUARED_SIDE:
        raise unsuitable(rows, columns, f"at most {MAX_SQUARED_SIDE:,} pixels long")
    step = max(BAND_PIXELS // whole, 1)
    narrow = [
        _narrowed(_centred(image[top : top + step], whole, colour, axis=1), side, resample)
        for top in range(0, rows, step)
    ]
    return resized(_centred(np.concatenate(narrow), whole, colour, axis=0), side, side, resample)


def _narrowed(image: Pixels, width: int, resample: Filter) -> Pixels:
    return resized(image, image.shape[0], width, resample)


def check_aspect(height: int, width: int) -> None:
    """Raises RequestError if the sides differ so much that the resized image would be huge."""
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise unsuitable(height, width, f"at most {MAX_ASPECT} times as long as wide")


def unsuitable(height: int, width: int, bound: str) -> RequestError:
    """The error for an image that a model cannot process; `bound`: what images it can."""
    return RequestError(
        f"The image has {width:,} x {height:,} pixels; for this model it may be {bound}. "
        "Cut it or scale it down."
    )


def _centred(image: Pixels, length: int, colour: tuple[int, int, int], *, axis: int) -> Pixels:
    """`image` centred in `length` pixels along `axis`; an odd pixel of padding comes after it."""
    missing = length - image.shape[axis]
    if not missing:
        return image
    shape = list(image.shape)
    shape[axis] = length
    canvas = np.empty(shape, np.uint8)
    canvas[:] = colour
    place = [slice(None)] * 2
    place[axis] = slice(missing // 2, missing // 2 + image.shape[axis])
    canvas[tuple(place)] = image
    return canvas
