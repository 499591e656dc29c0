"""DeepSeek-OCR and DeepSeek-OCR 2: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import FLAVOURS, LLAMA_CPP, OLLAMA, Conversion, Key
from model_zoo.models.deepseekocr.text import EPS

CONVERSION = Conversion(
    serves=("DeepseekOCRForCausalLM", "DeepseekOCR2ForCausalLM"),
    model_types=("deepseek_ocr2_text",),
    architecture={LLAMA_CPP: "deepseek2-ocr", OLLAMA: "deepseekocr"},
    keys=(
        *decoders.KEYS,
        *decoders.LEADING_DENSE_KEYS,
        Key("expert_weights_norm", "norm_topk_prob", of=bool),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        *decoders.LEADING_DENSE,
        *decoders.PRE_NORMS,
    ),
    drop=(
        "sam_model.**",
        "vision_model.**",
        "qwen2_model.**",
        "projector.**",
        "image_newline",
        "view_seperator",
    ),
    defaults={"rms_norm_eps": EPS, "routed_scaling_factor": 1.0, "norm_topk_prob": False},
    check=checks.all_of(
        checks.only_scalings(),
        checks.only_values(
            use_mla=False,
            topk_method="greedy",
            scoring_func="softmax",
            moe_layer_freq=1,
            hidden_act="silu",
        ),
    ),
    heads=FLAVOURS,
)
