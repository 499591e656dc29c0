"""Qwen3-VL and Qwen 3.5: conversion of vision checkpoints to GGUF."""

from collections.abc import Callable
from dataclasses import replace
from math import isqrt

from model_zoo.convert import checks, towers
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, Conversion, Key, Rule
from model_zoo.images.normalise import STANDARD
from model_zoo.layers.rope_scaling import DEFAULT_BASE
from model_zoo.layers.vision.vision_sizes import MERGED
from model_zoo.models.qwen3vl.vision import EPS, FILE_FRAMES, FRAMES, PLACES


def _deep(config: Configuration) -> list[int]:
    return list(config.require("deepstack_visual_indexes"))


def _is_deep(config: Configuration) -> list[bool]:
    return [layer in _deep(config) for layer in range(config.layers)]


def _deep_rules(source: str, llama_cpp: str, ollama: str) -> tuple[Rule, Rule]:
    """Rules for a module of the mergers. llama.cpp's files number them by layer, Ollama's by
    merger."""
    stored = f"deepstack_merger_list.{{n}}.{source}.*"
    return (
        Rule(
            stored,
            f"v.deepstack.{{n}}.{llama_cpp}.*",
            only=lambda c, n: n in _deep(c),
            layer=lambda c, n: _deep(c)[n] if n < len(_deep(c)) else None,
            flavours=(LLAMA_CPP,),
        ),
        Rule(
            stored,
            f"v.deepstack_merger.{{n}}.{ollama}.*",
            only=lambda c, n: n < len(_deep(c)),
            flavours=(OLLAMA,),
        ),
    )


def _table_side(config: Configuration) -> int:
    """The side of the position table in pixels, as readers of llama.cpp's files expect it."""
    return isqrt(config.require_size("num_position_embeddings")) * config.require_size("patch_size")


def _of_model(name: str) -> Callable[[Configuration], int]:
    return lambda config: config.model.require_size(name)


_MODULES = (
    ("norm1", "ln1", "norm1"),
    ("attn.proj", "attn_out", "attn_out"),
    ("norm2", "ln2", "norm2"),
    ("mlp.linear_fc1", "ffn_up", "mlp.linear_fc1"),
    ("mlp.linear_fc2", "ffn_down", "mlp.linear_fc2"),
)


VISION = Conversion(
    serves=("Qwen3VLForConditionalGeneration",),
    architecture={LLAMA_CPP: "clip", OLLAMA: "qwen3vl"},
    keys=(
        *towers.SIZES,
        Key("vision.spatial_merge_size", "spatial_merge_size"),
        Key("vision.temporal_patch_size", "temporal_patch_size", flavours=(OLLAMA,)),
        Key("vision.num_channels", "in_channels", flavours=(OLLAMA,)),
        Key("vision.num_positional_embeddings", "num_position_embeddings", flavours=(OLLAMA,)),
        Key("vision.deepstack_visual_indexes", lambda c: _deep(c) or None, flavours=(OLLAMA,)),
        Key("vision.rope.freq_base", towers.rope_base, flavours=(OLLAMA,)),
        Key("vision.longest_edge", towers.most_pixels, flavours=(OLLAMA,)),
        Key("vision.shortest_edge", towers.least_pixels, flavours=(OLLAMA,)),
        towers.epsilon(EPS, OLLAMA),
        *towers.clip("qwen3vl_merger", STANDARD, eps=EPS),
        Key("use_gelu", lambda c: True, flavours=(LLAMA_CPP,)),
        Key("vision.image_size", _table_side, flavours=(LLAMA_CPP,)),
        Key("vision.is_deepstack_layers", _is_deep, flavours=(LLAMA_CPP,)),
        Key("vision.image_max_pixels", towers.most_pixels, flavours=(LLAMA_CPP,)),
        Key("vision.image_min_pixels", towers.least_pixels, flavours=(LLAMA_CPP,)),
    ),
    rules=(
        *(
            Rule(
                "patch_embed.proj.weight",
                f"v.{name}",
                towers.frame(index),
                flavours=(LLAMA_CPP,),
            )
            for index, name in enumerate(FILE_FRAMES)
        ),
        Rule("patch_embed.proj.bias", "v.patch_embd.bias", flavours=(LLAMA_CPP,)),
        Rule("patch_embed.proj.weight", "v.patch_embed.weight", towers.stacked, flavours=(OLLAMA,)),
        Rule("patch_embed.proj.bias", "v.patch_embed.bias", flavours=(OLLAMA,)),
        *towers.both("pos_embed.weight", "v.position_embd.weight", "v.pos_embed.weight"),
        Rule("blocks.{n}.attn.qkv.*", "v.blk.{n}.attn_qkv.*", flavours=(LLAMA_CPP,)),
        *towers.split_qkv(OLLAMA),
        *towers.layers("blocks.{n}", _MODULES),
        *towers.both("merger.norm.*", "v.post_ln.*", "v.merger.norm.*"),
        *towers.both("merger.linear_fc1.*", "mm.0.*", "v.merger.linear_fc1.*"),
        *towers.both("merger.linear_fc2.*", "mm.2.*", "v.merger.linear_fc2.*"),
        *_deep_rules("norm", "norm", "norm"),
        *_deep_rules("linear_fc1", "fc1", "linear_fc1"),
        *_deep_rules("linear_fc2", "fc2", "linear_fc2"),
    ),
    roots=towers.roots("visual"),
    drop=towers.TEXT,
    defaults={
        "spatial_merge_size": MERGED,
        "temporal_patch_size": FRAMES,
        "in_channels": 3,
        "num_position_embeddings": PLACES,
        "deepstack_visual_indexes": [8, 16, 24],
    },
    spellings={"num_hidden_layers": "depth", "num_attention_heads": "num_heads"},
    check=checks.all_of(
        towers.known_setting("hidden_act", "gelu_pytorch_tanh"),
        towers.known_setting("in_channels", 3),
        towers.known_setting("temporal_patch_size", FRAMES),
    ),
    checks={LLAMA_CPP: towers.known_rope_base(DEFAULT_BASE)},
)


VISION_OF_EXPERTS = replace(
    VISION,
    serves=("Qwen3VLMoeForConditionalGeneration",),
    architecture={LLAMA_CPP: "clip", OLLAMA: "qwen3vlmoe"},
)


# Readers of Ollama's files assume the tokens of Qwen3-VL if a file states none.
_TOKENS = ("image_token_id", "vision_start_token_id", "vision_end_token_id")


VISION_OF_QWEN35 = replace(
    VISION,
    serves=("Qwen3_5ForConditionalGeneration",),
    architecture={LLAMA_CPP: "clip", OLLAMA: "qwen35"},
    keys=(
        *VISION.keys,
        *(Key(name, _of_model(name), flavours=(OLLAMA,)) for name in _TOKENS),
    ),
    defaults={**VISION.defaults, "deepstack_visual_indexes": []},
)


VISION_OF_QWEN35_EXPERTS = replace(
    VISION_OF_QWEN35,
    serves=("Qwen3_5MoeForConditionalGeneration",),
    architecture={LLAMA_CPP: "clip", OLLAMA: "qwen35moe"},
)
