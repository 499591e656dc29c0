"""Image processor of Gemma 3: stretches the whole image to a square."""

from dataclasses import dataclass

from torch import Tensor

from model_zoo.images.normalise import STANDARD, Normalisation
from model_zoo.images.resize import Filter, Pixels, resized
from runtime.vision.encoder import ImageOutline


@dataclass(frozen=True, slots=True)
class Gemma3Processor:
    """pixels [3, side, side]; the vision model pools them to a fixed number of rows."""

    side: int
    rows: int
    normalisation: Normalisation = STANDARD

    @property
    def most_rows(self) -> int:
        return self.rows

    @property
    def largest(self) -> ImageOutline:
        return self.outline(self.side, self.side)

    def outline(self, height: int, width: int) -> ImageOutline:
        return ImageOutline((3, self.side, self.side), (1, 1), self.rows)

    def pixels(self, image: Pixels) -> Tensor:
        return self.normalisation(resized(image, self.side, self.side, Filter.BILINEAR))
