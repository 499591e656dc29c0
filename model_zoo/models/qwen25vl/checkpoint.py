"""Qwen2.5-VL: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, Conversion, Key
from model_zoo.models.qwen25vl.text import SECTIONS

CONVERSION = Conversion(
    serves=("Qwen2_5_VLForConditionalGeneration",),
    architecture={LLAMA_CPP: "qwen2vl", OLLAMA: "qwen25vl"},
    keys=(
        *decoders.KEYS,
        *decoders.YARN_SCALING,
        decoders.sections_key(SECTIONS),
        Key(
            "rope.mrope_section",
            lambda c: decoders.rotated_sections(c, SECTIONS),
            flavours=(OLLAMA,),
        ),
    ),
    rules=decoders.llama_rules(),
    drop=decoders.OTHER_PARTS,
    check=checks.all_of(checks.only_scalings("yarn", "mrope"), checks.no_windows),
)
