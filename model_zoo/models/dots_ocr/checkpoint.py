"""dots.ocr: conversion of text model checkpoints to GGUF."""

from dataclasses import replace

from model_zoo.convert import decoders
from model_zoo.models.qwen2.checkpoint import CONVERSION as QWEN2

CONVERSION = replace(
    QWEN2,
    serves=("DotsOCRForCausalLM",),
    model_types=(),
    drop=decoders.OTHER_PARTS,
    nested={},
)
