"""The parts of a family's vision model."""

from dataclasses import dataclass

from model_zoo.images.prepared import ImageProcessor
from model_zoo.multimodal.placeholders import Placeholders
from runtime.vision.encoder import VisionTower


@dataclass(frozen=True, slots=True, eq=False)
class MultimodalSpec:
    """`depth`: width of a feature row in hidden sizes, above one if several layers add a part."""

    tower: VisionTower
    processor: ImageProcessor
    placeholders: Placeholders
    depth: int = 1
