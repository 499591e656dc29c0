"""HunyuanOCR and Hunyuan-VL: conversion of vision checkpoints to GGUF."""

from torch import Tensor

from model_zoo.convert import checks, towers
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Key, Rule
from model_zoo.images.normalise import CLIP
from model_zoo.layers.vision.vision_sizes import MERGED
from model_zoo.models.hunyuan.vision import EPS


def _without_class(config: Configuration, table: Tensor) -> Tensor:
    """The position table without its first row, which no patch uses."""
    return table[1:]


_MODULES = (
    ("input_layernorm", "ln1"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_out"),
    ("post_attention_layernorm", "ln2"),
    ("mlp.dense_h_to_4h", "ffn_up"),
    ("mlp.dense_4h_to_h", "ffn_down"),
)


VISION = Conversion(
    serves=("HunYuanVLForConditionalGeneration",),
    architecture={LLAMA_CPP: "clip"},
    keys=(
        *towers.SIZES,
        Key("vision.image_size", "max_image_size"),
        Key("vision.spatial_merge_size", "spatial_merge_size"),
        *towers.clip("hunyuanvl", CLIP, eps="rms_norm_eps"),
        Key("use_gelu", lambda c: True),
        Key("vision.image_max_pixels", towers.most_pixels),
        Key("vision.image_min_pixels", towers.least_pixels),
    ),
    rules=(
        Rule("vit.embeddings.patch_embedding.*", "v.patch_embd.*"),
        Rule("vit.embeddings.position_embedding.weight", "v.position_embd.weight", _without_class),
        *towers.layers("vit.layers.{n}", _MODULES),
        Rule("vit.perceive.before_rms.weight", "mm.pre_norm.weight"),
        Rule("vit.perceive.proj.0.*", "mm.0.*"),
        Rule("vit.perceive.proj.2.*", "mm.2.*"),
        Rule("vit.perceive.mlp.*", "mm.model.fc.*"),
        Rule("vit.perceive.image_newline", "v.image_newline"),
        Rule("vit.perceive.image_begin", "mm.image_begin"),
        Rule("vit.perceive.image_end", "mm.image_end"),
        Rule("vit.perceive.image_sep", "v.view_seperator"),
        Rule("vit.perceive.after_rms.weight", "mm.post_norm.weight"),
    ),
    roots=("model.",),
    drop=towers.TEXT,
    defaults={"rms_norm_eps": EPS, "spatial_merge_size": MERGED, "patch_size": 16},
    check=checks.all_of(
        towers.known_setting("hidden_act", "gelu"),
        towers.known_setting("interpolate_mode", "bilinear"),
        towers.known_setting("num_channels", 3),
        towers.known_setting("temporal_patch_size", 1),
    ),
)
