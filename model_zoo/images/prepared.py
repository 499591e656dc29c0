"""What every image processor does, and the name that it gives to its result."""

import hashlib
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.vision.encoder import PreparedImage

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Outline:
    """What an image of some size will be made into, told before anything is decoded.

    `shape`: of its pixels; `grid` and `rows` as PreparedImage has them.
    """

    shape: tuple[int, ...]
    grid: tuple[int, int]
    rows: int

    @property
    def nbytes(self) -> int:
        """Of the pixels, which are float32."""
        return 4 * prod(self.shape)


class ImageBounds(Protocol):
    """The largest images that a processor produces: memory is planned for `most_rows`, and the
    start is tested with `largest`.

    `most_rows` is an upper bound of the rows of every image. `largest` is the outline of an image
    that the processor really produces, with as many rows or nearly so. No image has more than
    `most_rows / largest.rows` times the pixels of `largest`.
    """

    @property
    def most_rows(self) -> int: ...

    @property
    def largest(self) -> Outline: ...


class ImageProcessor(ImageBounds, Protocol):
    """A frozen dataclass of the numbers that a model file states, which its reader has checked.

    `outline` tells what `prepare` will make of an image of that size. `prepare` takes image
    [height, width, 3] as `decode` gives it and `tower`, the name of the file with the tower's
    weights. Both raise RequestError for an image of which the model can make nothing.
    """

    def outline(self, height: int, width: int) -> Outline: ...

    def prepare(self, image: NDArray[np.uint8], *, tower: bytes) -> PreparedImage: ...


def blank(outline: Outline) -> PreparedImage:
    """An image of zeros."""
    return PreparedImage(torch.zeros(outline.shape), outline.grid, bytes(16), outline.rows)


def as_outlined(outline: Outline, pixels: Tensor, digest: bytes) -> PreparedImage:
    assert pixels.shape == outline.shape, (pixels.shape, outline.shape)
    return PreparedImage(pixels, outline.grid, digest, outline.rows)


def digest_of(image: NDArray[np.uint8], processor: ImageProcessor, tower: bytes) -> bytes:
    """Names the features of `image`: equal only for equal pixels, settings and tower.

    The settings are the fields of the dataclass. Pixels are those before resizing: an image that
    is known need not be processed again.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in (tower, repr(processor).encode(), repr(image.shape).encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    digest.update(np.ascontiguousarray(image).data)
    return digest.digest()
