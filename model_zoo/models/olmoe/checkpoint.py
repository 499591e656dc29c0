"""OLMoE: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, Conversion
from runtime.errors import UnsupportedModelError


def _as_published(config: Configuration) -> None:
    """Refuses clipped projections and renormalised weights of experts."""
    for setting in ("clip_qkv", "norm_topk_prob"):
        if config.get(setting):
            raise UnsupportedModelError(
                f"{config.path}: has `{setting}`, which files of this architecture cannot express."
            )


CONVERSION = Conversion(
    serves=("OlmoeForCausalLM",),
    architecture="olmoe",
    keys=(*decoders.KEYS, *decoders.YARN_SCALING, *decoders.EXPERT_COUNTS),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        *decoders.experts(),
        *decoders.PRE_NORMS,
        *decoders.HEAD_NORMS,
    ),
    check=checks.all_of(checks.only_scalings("yarn"), _as_published),
    heads=(LLAMA_CPP,),
)
