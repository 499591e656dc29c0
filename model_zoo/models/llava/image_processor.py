"""Image processor of CLIP and LLaVA: crops the image's centre, or pads it to a square."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_zoo.images.normalise import CLIP, Normalisation
from model_zoo.images.prepared import ImageOutline, as_outlined, digest_of
from model_zoo.images.resize import Filter, Pixels, check_aspect, resized, squared
from runtime.vision.encoder import PreparedImage


@dataclass(frozen=True, slots=True)
class ClipProcessor:
    """pixels [3, side, side]; `whole`: the image is padded with the mean colour, otherwise
    cropped."""

    side: int
    rows: int
    whole: bool = False
    resample: Filter = Filter.BICUBIC
    normalisation: Normalisation = CLIP

    @property
    def most_rows(self) -> int:
        return self.rows

    @property
    def largest(self) -> ImageOutline:
        return self.outline(self.side, self.side)

    def outline(self, height: int, width: int) -> ImageOutline:
        """Raises RequestError for an aspect ratio that is too extreme to crop."""
        if not self.whole:
            check_aspect(height, width)
        return ImageOutline((3, self.side, self.side), (1, 1), self.rows)

    def prepare(self, image: NDArray[np.uint8], *, tower: bytes) -> PreparedImage:
        outline = self.outline(*image.shape[:2])
        square = self._padded(image) if self.whole else self._middle(image)
        pixels = self.normalisation(square)
        return as_outlined(outline, pixels, digest_of(image, self, tower))

    def _padded(self, image: Pixels) -> Pixels:
        red, green, blue = (int(value * 255) for value in self.normalisation.mean)
        return squared(image, self.side, self.resample, (red, green, blue))

    def _middle(self, image: Pixels) -> Pixels:
        height, width, _ = image.shape
        longer = self.side * max(height, width) // min(height, width)
        high, wide = (self.side, longer) if height <= width else (longer, self.side)
        whole = resized(image, high, wide, self.resample)
        top, left = (high - self.side) // 2, (wide - self.side) // 2
        return whole[top : top + self.side, left : left + self.side]
