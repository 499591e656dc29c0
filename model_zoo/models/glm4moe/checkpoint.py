"""GLM-4.5, GLM-4.5V and later, and Solar Open: conversion of text model checkpoints to GGUF."""

from dataclasses import replace

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Key

# As in Glm4vMoeTextRotaryEmbedding of `transformers`.
SECTIONS = (8, 12, 12)


CONVERSION = Conversion(
    serves=("Glm4MoeForCausalLM",),
    model_types=("glm4_moe",),
    architecture="glm4moe",
    keys=(*decoders.KEYS, *decoders.LEADING_DENSE_KEYS, *decoders.SIGMOID_KEYS),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        *decoders.LEADING_DENSE,
        decoders.EXPERT_BIAS,
        *decoders.POST_ATTENTION_NORMS,
        *decoders.STATED_HEAD_NORMS,
    ),
    defaults={"partial_rotary_factor": 0.5, "n_group": 1, "topk_group": 1},
    check=checks.only_scalings(),
)


OF_VISION_MODELS = replace(
    CONVERSION,
    serves=("Glm4vMoeForConditionalGeneration",),
    model_types=("glm4v_moe_text",),
    architecture={LLAMA_CPP: "glm4moe"},
    keys=(*CONVERSION.keys, decoders.sections_key(SECTIONS)),
    drop=decoders.OTHER_PARTS,
    check=checks.only_scalings("mrope"),
)

# All layers have experts, and heads are rotated whole.
SOLAR_OPEN = replace(
    CONVERSION,
    serves=("SolarOpenForCausalLM",),
    model_types=("solar_open",),
    keys=(
        *(key for key in CONVERSION.keys if key.name != "feed_forward_length"),
        Key("feed_forward_length", "intermediate_size", optional=True),
        *decoders.YARN_SCALING,
    ),
    defaults={"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    check=checks.only_scalings("yarn"),
)
