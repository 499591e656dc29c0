"""Llama 4: conversion of vision checkpoints to GGUF."""

from model_zoo.convert import checks, towers
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, Conversion, Key
from model_zoo.images.normalise import STANDARD
from model_zoo.layers.rope_scaling import DEFAULT_BASE
from model_zoo.models.llama4.vision import EPS


def _shuffle(config: Configuration) -> int:
    ratio = float(config.require("pixel_shuffle_ratio"))
    if 1 / ratio != round(1 / ratio):
        raise config.error(f"has a `pixel_shuffle_ratio` of {ratio}; it must be 1 / n")
    return round(1 / ratio)


_MODULES = (
    ("input_layernorm", "ln1", "attn_norm"),
    ("self_attn.q_proj", "attn_q", "attn_q"),
    ("self_attn.k_proj", "attn_k", "attn_k"),
    ("self_attn.v_proj", "attn_v", "attn_v"),
    ("self_attn.o_proj", "attn_out", "attn_output"),
    ("post_attention_layernorm", "ln2", "ffn_norm"),
    ("mlp.fc1", "ffn_up", "mlp.fc1"),
    ("mlp.fc2", "ffn_down", "mlp.fc2"),
)


VISION = Conversion(
    serves=("Llama4ForConditionalGeneration",),
    architecture={LLAMA_CPP: "clip", OLLAMA: "llama4"},
    keys=(
        *towers.SIZES,
        towers.IMAGE_SIZE,
        Key("vision.rope.freq_base", towers.rope_base, flavours=(OLLAMA,)),
        Key("vision.pixel_shuffle_ratio", "pixel_shuffle_ratio", of=float, flavours=(OLLAMA,)),
        towers.epsilon(EPS, OLLAMA, name="vision.layer_norm_epsilon"),
        *towers.clip("llama4", STANDARD, eps=EPS),
        Key("use_gelu", lambda c: True, flavours=(LLAMA_CPP,)),
        Key("vision.projector.scale_factor", _shuffle, flavours=(LLAMA_CPP,)),
    ),
    rules=(
        *towers.both(
            "patch_embedding.linear.weight", "v.patch_embd.weight", "v.patch_embedding.weight"
        ),
        *towers.both("class_embedding", "v.class_embd", "v.class_embedding", keep=True),
        *towers.both(
            "positional_embedding_vlm",
            "v.position_embd.weight",
            "v.positional_embedding_vlm",
            keep=True,
        ),
        *towers.both("layernorm_pre.*", "v.pre_ln.*", "v.layernorm_pre.*"),
        *towers.both("layernorm_post.*", "v.post_ln.*", "v.layernorm_post.*"),
        *towers.layers("model.layers.{n}", _MODULES),
        *(
            rule
            for number in (1, 2)
            for rule in towers.both(
                f"vision_adapter.mlp.fc{number}.weight",
                f"mm.model.mlp.{number}.weight",
                f"v.vision_adapter.mlp.fc{number}.weight",
            )
        ),
        *towers.both(
            "multi_modal_projector.linear_1.weight", "mm.model.fc.weight", "mm.linear_1.weight"
        ),
    ),
    roots=("model.vision_model.", "vision_model."),
    drop=towers.TEXT,
    defaults={"pixel_shuffle_ratio": 0.5},
    check=checks.all_of(
        towers.known_setting("hidden_act", "gelu"),
        towers.known_setting("num_channels", 3),
    ),
    checks={LLAMA_CPP: towers.known_rope_base(DEFAULT_BASE)},
)
