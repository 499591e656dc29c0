"""Mistral 3 and Ministral 3: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, Conversion, Key
from model_zoo.models.mistral3.text import TEMPERATURE_KEYS


def _yarn(name: str, setting: str, *flavours: str) -> Key:
    return Key(f"rope.scaling.{name}", decoders.yarn_source(setting), flavours=flavours)


_BETA = decoders.yarn_source("llama_4_scaling_beta")


CONVERSION = Conversion(
    serves=("Mistral3ForConditionalGeneration", "Ministral3ForCausalLM"),
    text_types_of_others=("mistral4",),
    architecture="mistral3",
    keys=(
        *decoders.KEYS,
        *decoders.YARN_SCALING,
        _yarn("mscale", "mscale", LLAMA_CPP, OLLAMA),
        _yarn("yarn_log_multiplier", "mscale_all_dim", LLAMA_CPP),
        _yarn("mscale_all_dim", "mscale_all_dim", OLLAMA),
        _yarn("beta_fast", "beta_fast", OLLAMA),
        _yarn("beta_slow", "beta_slow", OLLAMA),
        Key(TEMPERATURE_KEYS[0], _BETA, flavours=(LLAMA_CPP,)),
        Key(TEMPERATURE_KEYS[1], _BETA, flavours=(OLLAMA,)),
    ),
    rules=decoders.llama_rules(rotated=True),
    drop=decoders.OTHER_PARTS,
    check=checks.all_of(checks.only_scalings("yarn"), checks.no_windows),
)
