"""The interface of image processors, and the digest that identifies their results."""

import hashlib
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from torch import Tensor

from model_zoo.images.resize import Pixels
from runtime.vision.encoder import ImageOutline, PreparedImage

DIGEST_BYTES = 32
# Sizes that are tried in the search for an image with a number of rows: heights in pixels, and
# widths as multiples of the height. The last one needs the fewest tiles where images are enlarged.
SIDES, ASPECTS = (32, 64, 128, 256, 512, 1024, 2048), (1, 2, 4)


class ImageBounds(Protocol):
    """Bounds of the images that a processor produces.

    `most_rows`: an upper bound of the rows of every image, for which memory is planned. `largest`:
    outline of a possible image with (nearly) this many rows. No image has more than `most_rows /
    largest.rows` times the pixels of `largest`.
    """

    @property
    def most_rows(self) -> int: ...

    @property
    def largest(self) -> ImageOutline: ...


class ImageProcessor(ImageBounds, Protocol):
    """A frozen dataclass of the validated settings of a model file.

    `outline`: of an image of that size; RequestError if the model cannot process it. `pixels`: of
    an image [height, width, 3] uint8 that has an outline, float32 in the shape that this states.
    """

    def outline(self, height: int, width: int) -> ImageOutline: ...

    def pixels(self, image: Pixels) -> Tensor: ...


def prepare(image: Pixels, processor: ImageProcessor, *, tower: bytes) -> PreparedImage:
    """`image` [height, width, 3] from `decode`; `tower`: the digest of the file with the vision
    model's weights. RequestError for an image that the model cannot process."""
    outline = processor.outline(*image.shape[:2])
    pixels = processor.pixels(image)
    assert pixels.shape == outline.shape, (pixels.shape, outline.shape)
    digest = _digest_of(image, processor, tower)
    return PreparedImage(pixels, outline.grid, digest, outline.rows)


def outline_within(processor: ImageProcessor, rows: int) -> ImageOutline:
    """That of the image with the most feature rows, of those that have at most `rows`; if all have
    more, that of the image with the fewest. Only some shapes and sizes are tried."""
    tried = [processor.largest, *_tried(processor)]
    fitting = [outline for outline in tried if outline.rows <= rows]
    if fitting:
        return max(fitting, key=lambda outline: outline.rows)
    return min(tried, key=lambda outline: outline.rows)


def _tried(processor: ImageProcessor) -> Iterator[ImageOutline]:
    for aspect in ASPECTS:
        for side in SIDES:
            yield processor.outline(side, aspect * side)


def _digest_of(image: Pixels, processor: ImageProcessor, tower: bytes) -> bytes:
    """Digest of the features of `image`: equal only for equal pixels, settings and vision model.

    The settings are the fields of the dataclass. The digest covers the pixels before resizing, so
    that a known image need not be processed again.
    """
    settings = repr((processor, image.shape)).encode()
    digest = hashlib.blake2b(tower + settings, digest_size=DIGEST_BYTES)
    digest.update(np.ascontiguousarray(image).data)
    return digest.digest()
