"""Gemma 3's eyes: every image is stretched to one square."""

from model_zoo.eyes.numbers import read_normalisation
from model_zoo.eyes.parts import EyeParts
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import STANDARD
from model_zoo.placement.gemma3 import GemmaPlacement
from model_zoo.processors.square import SquareProcessor
from model_zoo.tokenizer import Tokenizer
from model_zoo.towers.gemma3 import build_tower


def build_eyes(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> EyeParts:
    tower = build_tower(w, metadata)
    side = tower.largest().pixels.shape[-1]
    normalisation = read_normalisation(metadata, STANDARD)
    processor = SquareProcessor(side, tower.limits.rows, normalisation=normalisation)
    return EyeParts(tower, processor, GemmaPlacement(tokenizer))
