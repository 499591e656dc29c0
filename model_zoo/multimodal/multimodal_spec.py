"""The parts of a family's vision model."""

from dataclasses import dataclass

from model_zoo.images.prepared import ImageProcessor
from model_zoo.multimodal.placeholders import Placeholders
from runtime.vision.encoder import VisionTower


@dataclass(frozen=True, slots=True, eq=False)
class MultimodalSpec:
    """What a family provides for images. `depth`: width of a feature row in hidden sizes, more than
    one if several layers contribute features."""

    tower: VisionTower
    processor: ImageProcessor
    placeholders: Placeholders
    depth: int = 1
