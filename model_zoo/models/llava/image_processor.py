"""Image processor of CLIP, LLaVA and Moondream: a square of the image, cropped, padded or
stretched."""

from dataclasses import dataclass
from enum import Enum, auto

from torch import Tensor

from model_zoo.images.normalise import CLIP, Normalisation
from model_zoo.images.resize import Filter, Pixels, check_aspect, resized, squared
from runtime.vision.encoder import ImageOutline


class Fit(Enum):
    """How an image becomes a square: its centre, the whole image on the mean colour, or the whole
    image without its aspect ratio."""

    CROPPED = auto()
    PADDED = auto()
    STRETCHED = auto()


@dataclass(frozen=True, slots=True)
class LlavaProcessor:
    """pixels [3, side, side]"""

    side: int
    rows: int
    fit: Fit = Fit.CROPPED
    normalisation: Normalisation = CLIP

    @property
    def most_rows(self) -> int:
        return self.rows

    @property
    def largest(self) -> ImageOutline:
        return self.outline(self.side, self.side)

    def outline(self, height: int, width: int) -> ImageOutline:
        """Raises RequestError for an aspect ratio that is too extreme to crop."""
        if self.fit is Fit.CROPPED:
            check_aspect(height, width)
        return ImageOutline((3, self.side, self.side), (1, 1), self.rows)

    def pixels(self, image: Pixels) -> Tensor:
        match self.fit:
            case Fit.CROPPED:
                square = self._middle(image)
            case Fit.PADDED:
                square = self._padded(image)
            case Fit.STRETCHED:
                square = resized(image, self.side, self.side, Filter.BICUBIC)
        return self.normalisation(square)

    def _padded(self, image: Pixels) -> Pixels:
        red, green, blue = (int(value * 255) for value in self.normalisation.mean)
        return squared(image, self.side, Filter.BICUBIC, (red, green, blue))

    def _middle(self, image: Pixels) -> Pixels:
        height, width, _ = image.shape
        longer = self.side * max(height, width) // min(height, width)
        high, wide = (self.side, longer) if height <= width else (longer, self.side)
        whole = resized(image, high, wide, Filter.BICUBIC)
        top, left = (high - self.side) // 2, (wide - self.side) // 2
        return whole[top : top + self.side, left : left + self.side]
