"""What every image processor does, and the name that it gives to its result."""

import hashlib
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.vision import PreparedImage

DIGEST_BYTES = 32


class ImageProcessor(Protocol):
    """A frozen dataclass of the numbers that a model file states, which its reader has checked.

    `most_rows` bounds `PreparedImage.rows`. `prepare` takes image [height, width, 3] as `decode`
    gives it and `tower`, the name of the file with the tower's weights; it raises RequestError for
    an image of which the model can make nothing.
    """

    @property
    def most_rows(self) -> int: ...

    def prepare(self, image: NDArray[np.uint8], *, tower: bytes) -> PreparedImage: ...


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
