"""Llama 4's eyes: images in tiles, and once as a whole."""

from model_zoo.eyes.numbers import read_normalisation
from model_zoo.eyes.parts import EyeParts
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import STANDARD
from model_zoo.placement.llama4 import LlamaPlacement
from model_zoo.processors.llama4 import Llama4Processor
from model_zoo.tokenizer import Tokenizer
from model_zoo.towers.llama4 import build_tower


def build_eyes(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> EyeParts:
    tower = build_tower(w, metadata)
    tiles, _, side, _ = tower.largest().pixels.shape
    processor = Llama4Processor(
        side,
        tower.limits.rows // tiles,
        normalisation=read_normalisation(metadata, STANDARD),
    )
    return EyeParts(tower, processor, LlamaPlacement(tokenizer))
