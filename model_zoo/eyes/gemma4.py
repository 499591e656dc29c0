"""Gemma 4's eyes: images keep their shape, and have as many rows as a budget allows."""

from model_zoo.eyes.numbers import read_normalisation
from model_zoo.eyes.parts import EyeParts
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import UNCHANGED
from model_zoo.placement.gemma4 import PlanePlacement
from model_zoo.processors.gemma4 import Gemma4Processor
from model_zoo.tokenizer import Tokenizer
from model_zoo.towers.gemma4 import build_tower


def build_eyes(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> EyeParts:
    tower = build_tower(w, metadata)
    processor = Gemma4Processor(
        metadata.require_size("vision.patch_size"),
        tower.pooled,
        tower.limits.rows,
        normalisation=read_normalisation(metadata, UNCHANGED),
    )
    return EyeParts(tower, processor, PlanePlacement(tokenizer))
