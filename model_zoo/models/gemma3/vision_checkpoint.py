"""Gemma 3: conversion of vision checkpoints to GGUF."""

from math import isqrt

from model_zoo.convert import checks, towers
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, Conversion, Key
from model_zoo.convert.transforms import plus_one
from model_zoo.images.normalise import STANDARD
from model_zoo.models.gemma3.vision import ROWS


def _rows(config: Configuration) -> int:
    return int(config.model.get("mm_tokens_per_image", ROWS))


def _across_pooled(config: Configuration) -> int:
    """The side, in patches, of the square that is pooled to one row."""
    across = config.require_size("image_size") // config.require_size("patch_size")
    return across // isqrt(_rows(config))


_MODULES = (
    ("layer_norm1", "ln1", "layer_norm1"),
    ("self_attn.q_proj", "attn_q", "attn_q"),
    ("self_attn.k_proj", "attn_k", "attn_k"),
    ("self_attn.v_proj", "attn_v", "attn_v"),
    ("self_attn.out_proj", "attn_out", "attn_output"),
    ("layer_norm2", "ln2", "layer_norm2"),
    ("mlp.fc1", "ffn_up", "mlp.fc1"),
    ("mlp.fc2", "ffn_down", "mlp.fc2"),
)


VISION = Conversion(
    serves=("Gemma3ForConditionalGeneration",),
    architecture={LLAMA_CPP: "clip", OLLAMA: "gemma3"},
    keys=(
        *towers.SIZES,
        towers.IMAGE_SIZE,
        Key("vision.num_channels", "num_channels", optional=True, flavours=(OLLAMA,)),
        towers.epsilon("layer_norm_eps", OLLAMA),
        Key("mm.tokens_per_image", _rows, flavours=(OLLAMA,)),
        *towers.clip("gemma3", STANDARD, eps="layer_norm_eps"),
        Key("use_gelu", lambda c: True, flavours=(LLAMA_CPP,)),
        Key("vision.projector.scale_factor", _across_pooled, flavours=(LLAMA_CPP,)),
    ),
    rules=(
        *towers.both("embeddings.patch_embedding.*", "v.patch_embd.*", "v.patch_embedding.*"),
        *towers.both(
            "embeddings.position_embedding.weight",
            "v.position_embd.weight",
            "v.position_embedding.weight",
        ),
        *towers.layers("encoder.layers.{n}", _MODULES),
        *towers.both("post_layernorm.*", "v.post_ln.*", "v.post_layernorm.*"),
        *towers.both(
            "multi_modal_projector.mm_soft_emb_norm.weight",
            "mm.soft_emb_norm.weight",
            "mm.mm_soft_emb_norm.weight",
            plus_one,
        ),
        *towers.both(
            "multi_modal_projector.mm_input_projection_weight",
            "mm.input_projection.weight",
            "mm.mm_input_projection.weight",
        ),
    ),
    roots=towers.roots("vision_tower.vision_model", "vision_tower"),
    drop=(*towers.TEXT, "head.**", "embeddings.position_ids"),
    defaults={"layer_norm_eps": 1e-6, "num_channels": 3},
    check=checks.all_of(
        towers.known_setting("hidden_act", "gelu_pytorch_tanh"),
        towers.known_setting("num_channels", 3),
    ),
)
