"""OLMo 2 and 3: conversion of text model checkpoints to GGUF."""

from dataclasses import replace

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, Conversion, Key
from model_zoo.models.olmo2.text import MAGNITUDE
from runtime.errors import UnsupportedModelError

CONVERSION = Conversion(
    serves=("Olmo2ForCausalLM",),
    model_types=("olmo2",),
    architecture="olmo2",
    keys=(*decoders.KEYS, *decoders.YARN_SCALING),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        *decoders.feed_forward(),
        *decoders.HEAD_NORMS,
        *decoders.POST_NORMS,
    ),
    check=checks.only_scalings("yarn"),
    heads=(LLAMA_CPP,),
)


def _plain_windows(config: Configuration) -> None:
    """Refuses scaled positions in layers with a window. Older settings state the scaling of the
    other layers only."""
    stated = config.get("rope_parameters") or {}
    kind = config.rope("sliding_attention")["rope_type"]
    if "sliding_attention" in stated and kind != "default":
        raise UnsupportedModelError(
            f"{config.path}: layers with a window have the rope scaling {kind}; in files of this "
            "architecture they have none."
        )


OLMO_3 = replace(
    CONVERSION,
    serves=("Olmo3ForCausalLM",),
    model_types=("olmo3",),
    architecture={LLAMA_CPP: "olmo2", OLLAMA: "olmo3"},
    keys=(
        *(key for key in CONVERSION.keys if key.name != MAGNITUDE),
        Key(MAGNITUDE, decoders.yarn_multiplier, flavours=(LLAMA_CPP,)),
        Key(MAGNITUDE, decoders.yarn_source("attention_factor"), flavours=(OLLAMA,)),
        Key("attention.sliding_window", "sliding_window"),
        Key("attention.sliding_window_pattern", lambda c: decoders.windows(c, every=4)),
        Key("rope.freq_base_swa", lambda c: decoders.rope_base(c, "sliding_attention")),
    ),
    defaults={"sliding_window": 4096, "rope_theta": 500000.0},
    check=checks.all_of(checks.only_scalings("yarn"), _plain_windows),
)
