"""Image processor of Gemma 3 and SigLIP: stretches the whole image to a square."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_zoo.images.normalise import STANDARD, Normalisation
from model_zoo.images.prepared import ImageOutline, as_outlined, digest_of
from model_zoo.images.resize import Filter, resized
from runtime.vision.encoder import PreparedImage


@dataclass(frozen=True, slots=True)
class SquareProcessor:
    """pixels [3, side, side]; the vision model pools them to a fixed number of rows (Gemma 3: 256).

    The filter is bilinear for Gemma 3 and bicubic for SigLIP.
    """

    side: int
    rows: int
    resample: Filter = Filter.BILINEAR
    normalisation: Normalisation = STANDARD

    @property
    def most_rows(self) -> int:
        return self.rows

    @property
    def largest(self) -> ImageOutline:
        return self.outline(self.side, self.side)

    def outline(self, height: int, width: int) -> ImageOutline:
        return ImageOutline((3, self.side, self.side), (1, 1), self.rows)

    def prepare(self, image: NDArray[np.uint8], *, tower: bytes) -> PreparedImage:
        pixels = self.normalisation(resized(image, self.side, self.side, self.resample))
        outline = self.outline(*image.shape[:2])
        return as_outlined(outline, pixels, digest_of(image, self, tower))
