"""StableLM and Orion: conversion of text model checkpoints to GGUF."""

from dataclasses import replace

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import FLAVOURS, Conversion, Key, Rule
from model_zoo.models.stablelm.text import ORION


def _is_sequential(config: Configuration, layer: int) -> bool:
    return not config.get("use_parallel_residual")


CONVERSION = Conversion(
    serves=("StableLmForCausalLM", "StableLMEpochForCausalLM"),
    model_types=("stablelm",),
    architecture="stablelm",
    keys=(
        *decoders.layer_normed(),
        Key("use_parallel_residual", "use_parallel_residual", of=bool),
    ),
    rules=(
        *decoders.EMBEDDINGS_AND_BIASED_NORM,
        *decoders.attention(),
        *decoders.feed_forward(),
        decoders.BIASED_PRE_NORMS[0],
        replace(decoders.BIASED_PRE_NORMS[1], only=_is_sequential),
        *(
            Rule(
                f"layers.{{n}}.self_attn.{name}_layernorm.norms.{{e}}.weight",
                f"blk.{{n}}.attn_{name}_norm.weight",
                only=decoders.states("qk_layernorm"),
            )
            for name in ("q", "k")
        ),
    ),
    spellings={"layer_norm_eps": "norm_eps", "partial_rotary_factor": "rope_pct"},
    defaults={
        "partial_rotary_factor": 0.25,
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": False,
    },
    check=checks.all_of(checks.only_scalings(), checks.only_values(hidden_act="silu")),
    heads=FLAVOURS,
)

# Its setting names RMS norms, but the authors' code computes layer norms.
ORION_14B = Conversion(
    serves=("OrionForCausalLM",),
    architecture=ORION,
    keys=decoders.layer_normed("rms_norm_eps"),
    rules=(
        *decoders.EMBEDDINGS_AND_BIASED_NORM,
        *decoders.attention(),
        *decoders.feed_forward(),
        *decoders.BIASED_PRE_NORMS,
    ),
    check=checks.all_of(checks.only_scalings(), checks.only_values(hidden_act="silu")),
    heads=FLAVOURS,
)
