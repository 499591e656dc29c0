"""Image processor of CLIP and LLaVA: crops the image's centre, or pads it to a square."""

from dataclasses import dataclass

from torch import Tensor

from model_zoo.images.normalise import CLIP, Normalisation
from model_zoo.images.resize import Filter, Pixels, check_aspect, resized, squared
from runtime.vision.encoder import ImageOutline


@dataclass(frozen=True, slots=True)
class LlavaProcessor:
    """pixels [3, side, side]; `whole`: the image is padded with the mean colour, otherwise
    cropped."""

    side: int
    rows: int
    whole: bool = False
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

    def pixels(self, image: Pixels) -> Tensor:
        return self.normalisation(self._padded(image) if self.whole else self._middle(image))

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
