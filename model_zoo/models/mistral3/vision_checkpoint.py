"""Mistral 3, Ministral 3 and LightOnOCR: conversion of vision checkpoints to GGUF."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from model_zoo.convert import checks, towers
from model_zoo.convert.configuration import Configuration, optional_json
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, Conversion, Key, Rule
from model_zoo.convert.transforms import interleaved
from model_zoo.images.normalise import CLIP
from model_zoo.layers.rope_scaling import DEFAULT_BASE
from model_zoo.models.mistral3.vision import (
    EDGE_KEY,
    EPS,
    LIGHTON,
    LIGHTON_EPS,
    MERGED,
    PROJECTOR_EPS,
)
from runtime.errors import UnsupportedModelError

BREAK = "[IMG_BREAK]"


def _unlike_eps(usual: float) -> Key:
    """The eps of the projector's norm, if it differs from the one that readers assume."""

    def unlike(config: Configuration) -> float | None:
        eps = float(config.model.get("rms_norm_eps", 1e-6))
        return None if eps == usual else eps

    return Key(PROJECTOR_EPS, unlike, flavours=(LLAMA_CPP,))


def _unlike_edge(config: Configuration) -> int | None:
    """The longest edge of images, if it differs from the size that readers assume."""
    edge = towers.longest_edge(config) or _square(config)
    return None if edge == config.require("image_size") else edge


def _square(config: Configuration) -> int | None:
    """The side of the square that bounds images, if the image processor states both sides."""
    size = towers.preprocessing(config).get("size")
    if not isinstance(size, Mapping) or size.get("height") is None:
        return None
    height, width = size["height"], size["width"]
    if height != width:
        raise config.error(
            f"has an image processor that bounds images to {height} x {width} pixels; files state "
            "one bound for both sides"
        )
    return int(height)


def _merging(config: Configuration) -> int:
    return int(config.model.get("spatial_merge_size", MERGED))


def _break_token(config: Configuration) -> int | None:
    """The token after each row of an image but the last."""
    added = optional_json(config.path.parent / "tokenizer.json").get("added_tokens") or ()
    return next((token["id"] for token in added if token["content"] == BREAK), None)


def _break_row(config: Configuration, embedding: Tensor) -> Tensor:
    row = _break_token(config)
    assert row is not None
    return embedding[row]


def _usual_layer(config: Configuration) -> None:
    if config.model.get("vision_feature_layer", -1) not in (-1, [-1]):
        raise UnsupportedModelError(
            f"{config.path}: takes features from the layer "
            f"{config.model.get('vision_feature_layer')}; files always mean the last."
        )


_MODULES = (
    ("attention_norm", "ln1", "attn_norm", None),
    ("attention.q_proj", "attn_q", "attn_q", interleaved("num_attention_heads")),
    ("attention.k_proj", "attn_k", "attn_k", interleaved("num_attention_heads")),
    ("attention.v_proj", "attn_v", "attn_v", None),
    ("attention.o_proj", "attn_out", "attn_output", None),
    ("ffn_norm", "ln2", "ffn_norm", None),
    ("feed_forward.gate_proj", "ffn_gate", "ffn_gate", None),
    ("feed_forward.up_proj", "ffn_up", "ffn_up", None),
    ("feed_forward.down_proj", "ffn_down", "ffn_down", None),
)


_PROJECTOR = (
    ("norm", "input_norm", "norm"),
    ("patch_merger.merging_layer", "patch_merger", "patch_merger.merging_layer"),
    ("linear_1", "1", "linear_1"),
    ("linear_2", "2", "linear_2"),
)


def _projector(source: str) -> tuple[Rule, ...]:
    return tuple(
        rule
        for module, llama_cpp, ollama in _PROJECTOR
        for rule in towers.both(f"{source}.{module}.*", f"mm.{llama_cpp}.*", f"mm.{ollama}.*")
    )


VISION = Conversion(
    serves=("Mistral3ForConditionalGeneration",),
    architecture={LLAMA_CPP: "clip", OLLAMA: "mistral3"},
    keys=(
        *towers.SIZES,
        towers.IMAGE_SIZE,
        Key(EDGE_KEY, _unlike_edge),
        Key("vision.attention.key_length", lambda c: c.head_dim, flavours=(OLLAMA,)),
        Key("vision.num_channels", "num_channels", flavours=(OLLAMA,)),
        Key("vision.rope.freq_base", towers.rope_base, flavours=(OLLAMA,)),
        towers.epsilon(EPS, OLLAMA),
        Key("spatial_merge_size", _merging, flavours=(OLLAMA,)),
        *towers.clip("pixtral", CLIP, eps=EPS),
        Key("vision.spatial_merge_size", _merging, flavours=(LLAMA_CPP,)),
        _unlike_eps(EPS),
        Key("use_silu", lambda c: c.get("hidden_act") == "silu", flavours=(LLAMA_CPP,)),
        Key("use_gelu", lambda c: c.get("hidden_act") == "gelu", flavours=(LLAMA_CPP,)),
    ),
    rules=(
        *towers.both("patch_conv.weight", "v.patch_embd.weight", "v.patch_conv.weight"),
        *towers.both("ln_pre.weight", "v.pre_ln.weight", "v.encoder_norm.weight"),
        *(
            Rule(
                f"transformer.layers.{{n}}.{module}.weight",
                f"v.blk.{{n}}.{name}.weight",
                turned if flavour == LLAMA_CPP else None,
                flavours=(flavour,),
            )
            for module, llama_cpp, ollama, turned in _MODULES
            for flavour, name in ((LLAMA_CPP, llama_cpp), (OLLAMA, ollama))
        ),
        *_projector("multi_modal_projector"),
        # Readers of llama.cpp's files insert it between the rows of an image themselves.
        *(
            Rule(
                f"{root}embed_tokens.weight",
                "v.token_embd.img_break",
                _break_row,
                optional=True,
                only=lambda c, _: _break_token(c) is not None,
                keep=True,
                flavours=(LLAMA_CPP,),
            )
            for root in ("language_model.", "language_model.model.")
        ),
    ),
    roots=towers.roots("vision_tower"),
    drop=towers.TEXT,
    defaults={"num_channels": 3, "hidden_act": "gelu"},
    check=checks.all_of(
        towers.known_setting("hidden_act", "silu", "gelu"),
        towers.known_setting("num_channels", 3),
        _usual_layer,
    ),
    checks={
        LLAMA_CPP: towers.known_rope_base(DEFAULT_BASE),
        OLLAMA: towers.known_setting("hidden_act", "silu"),
    },
)


_OWN = ("projector_type", PROJECTOR_EPS)
LIGHTON_VISION = replace(
    VISION,
    serves=("LightOnOcrForConditionalGeneration", "LightOnOCRForConditionalGeneration"),
    architecture={LLAMA_CPP: "clip"},
    keys=(
        *(key for key in VISION.keys if key.name not in _OWN),
        Key("projector_type", lambda c: LIGHTON),
        _unlike_eps(LIGHTON_EPS),
    ),
    rules=(
        *(rule for rule in VISION.rules if rule.target.startswith("v.") and not rule.optional),
        *_projector("vision_projection"),
    ),
    roots=towers.roots("vision_encoder"),
)
