"""Towers as their families build them, for images of the sizes that the tables of tests need."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import CLIP
from model_zoo.images.prepared import ImageBounds
from model_zoo.models.idefics3 import multimodal as idefics3_files
from model_zoo.models.lfm2 import vision as lfm2
from model_zoo.multimodal.bounded_processor import BoundedProcessor
from runtime.vision.encoder import VisionTower
from tests.families.towers import Build
from tests.families.vision_configs import SIDE, lfm2_processor


def with_processor(tower: Any, read: Callable[[Metadata], ImageBounds]) -> Build:
    def build(w: TensorScope, metadata: Metadata) -> VisionTower:
        return tower(w, metadata, read(metadata))

    return build


def with_37_tiles(tower: Any) -> Build:
    """For images of up to six by six tiles and the whole image, whose rows fill several slabs."""

    def build(w: TensorScope, metadata: Metadata) -> VisionTower:
        images = replace(idefics3_files.read_processor(metadata), longest_edge=6 * SIDE)
        return tower(w, metadata, images)

    return build


def lfm2_tower(w: TensorScope, metadata: Metadata) -> VisionTower:
    """For images of few rows, of which large ones are cut into tiny tiles."""
    keys = "vision.patch_size", "vision.projector.scale_factor"
    return lfm2.Lfm2Tower(w, metadata, lfm2_processor(*map(metadata.require_size, keys)))


def with_211_rows(
    tower: Any, images: Callable[[BoundedProcessor], ImageBounds] = lambda plain: plain
) -> Build:
    """For images of up to 211 merged patches, a prime: no grid but a line has exactly as many."""

    def build(w: TensorScope, metadata: Metadata) -> VisionTower:
        patch = metadata.require_size("vision.patch_size")
        merge = metadata.get_size("vision.spatial_merge_size", 2)
        plain = BoundedProcessor(patch, merge, 1, 211 * (patch * merge) ** 2, CLIP)
        return tower(w, metadata, images(plain))

    return build
