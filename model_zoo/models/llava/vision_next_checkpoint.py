"""LLaVA 1.6: conversion of vision checkpoints to GGUF."""

from collections.abc import Sequence
from dataclasses import replace

from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Key, Rule
from model_zoo.models.llava import vision_checkpoint as llava
from model_zoo.models.llava.vision import ASPECT_KEY
from model_zoo.models.llava.vision_next import CANVASES_KEY, MERGE_KEY, MERGED, TILED


def _canvases(config: Configuration) -> list[int]:
    stated: Sequence[Sequence[int]] = config.model.require("image_grid_pinpoints")
    return [int(side) for canvas in stated for side in canvas]


VISION = replace(
    llava.VISION,
    serves=("LlavaNextForConditionalGeneration",),
    keys=(
        *(key for key in llava.VISION.keys if key.name != ASPECT_KEY),
        Key(ASPECT_KEY, lambda c: TILED),
        Key(MERGE_KEY, lambda c: MERGED),
        Key(CANVASES_KEY, _canvases),
    ),
    rules=(*llava.VISION.rules, Rule("image_newline", "model.image_newline", keep=True)),
)
