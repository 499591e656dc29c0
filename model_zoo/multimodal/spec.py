"""What a family's vision model are made of."""

from dataclasses import dataclass

from model_zoo.images.prepared import ImageProcessor
from model_zoo.multimodal.placeholders import Placeholders
from runtime.vision.encoder import VisionTower


@dataclass(frozen=True, slots=True, eq=False)
class MultimodalSpec:
    """`depth`: how many hidden sizes wide a row of features is, more than one where the first
    layers of the text model get further parts of it."""

    tower: VisionTower
    processor: ImageProcessor
    placement: Placeholders
    depth: int = 1
