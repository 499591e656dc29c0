"""The parts of a family's vision model."""

from dataclasses import dataclass

from model_zoo.images.prepared import ImageProcessor
from model_zoo.multimodal.placeholders import PlaceholderRows, Placeholders
from runtime.vision.encoder import VisionTower


@dataclass(frozen=True, slots=True, eq=False)
class MultimodalSpec:
    """What a family provides for images. `depth`: width of a feature row in hidden sizes, more than
    one if several layers contribute features."""

    tower: VisionTower
    processor: ImageProcessor
    placeholders: Placeholders
    depth: int = 1

    @property
    def uses_grids(self) -> bool:
        """Whether the positions of an image form a rectangle, so that the text model needs several
        position axes."""
        pieces = self.placeholders.pieces(self.processor.largest)
        return any(isinstance(piece, PlaceholderRows) and piece.grid for piece in pieces)
