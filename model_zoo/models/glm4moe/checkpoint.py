"""GLM-4.5 and GLM-4.5V and later: conversion of text model checkpoints to GGUF."""

from dataclasses import replace

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import LLAMA_CPP, Conversion

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
