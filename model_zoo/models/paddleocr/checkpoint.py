"""PaddleOCR-VL: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import Conversion
from model_zoo.models.paddleocr.text import BASE, SECTIONS

CONVERSION = Conversion(
    serves=("PaddleOCRVLForConditionalGeneration",),
    architecture="paddleocr",
    keys=(*decoders.KEYS, decoders.sections_key(SECTIONS)),
    rules=decoders.llama_rules(),
    drop=(*decoders.OTHER_PARTS, "mlp_AR.**", "projector.**"),
    defaults={"tie_word_embeddings": True, "rope_theta": BASE},
    check=checks.only_scalings("mrope"),
)
