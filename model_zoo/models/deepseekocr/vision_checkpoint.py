"""DeepSeek-OCR: conversion of vision checkpoints to GGUF."""

from collections.abc import Mapping
from typing import Any

from model_zoo.convert import checks, towers
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, Conversion, Key, Rule
from model_zoo.images.normalise import STANDARD
from model_zoo.models.deepseekocr.vision import EPS
from runtime.errors import UnsupportedModelError

CLIP, SAM = "clip-l-14-224", "sam_vit_b"
# Settings that no checkpoint states.
WINDOW, WIDENED = 14, 4


def _sam(config: Configuration) -> Mapping[str, Any]:
    """The settings of the first encoder."""
    return config.model.of_part("vision_config", "width", SAM).whole


def _of_sam(name: str, llama_cpp: str, ollama: str | None = None) -> tuple[Key, ...]:
    """Keys of the first encoder, by flavour."""
    own = ((LLAMA_CPP, f"vision.sam.{llama_cpp}"), (OLLAMA, f"sam.{ollama or llama_cpp}"))
    return tuple(Key(key, lambda c: _sam(c)[name], flavours=(flavour,)) for flavour, key in own)


def _has_sam(config: Configuration, layer: int) -> bool:
    """Whether the first encoder has such a layer."""
    return bool(layer < _sam(config)["layers"])


def _linear(config: Configuration) -> None:
    kind = config.model.of_part("projector_config").get("projector_type")
    if kind != "linear":
        raise UnsupportedModelError(
            f"{config.path}: `projector_type` is {str(kind)[:80]}; files of this architecture mean "
            "linear."
        )


def _as_many_layers(config: Configuration) -> None:
    if _sam(config)["layers"] > config.layers:
        raise config.error(f"has more layers in `{SAM}` than in `{CLIP}`")


_CLIP_MODULES = (
    ("layer_norm1", "ln1", "layer_norm1"),
    ("self_attn.qkv_proj", "attn_qkv", "self_attn.qkv_proj"),
    ("self_attn.out_proj", "attn_out", "self_attn.out_proj"),
    ("layer_norm2", "ln2", "layer_norm2"),
    ("mlp.fc1", "ffn_up", "mlp.fc1"),
    ("mlp.fc2", "ffn_down", "mlp.fc2"),
)
_SAM_MODULES = (
    ("norm1.*", "pre_ln.*", "norm1.*"),
    ("attn.qkv.*", "attn.qkv.*", "attn.qkv.*"),
    ("attn.proj.*", "attn.out.*", "attn.proj.*"),
    ("norm2.*", "post_ln.*", "norm2.*"),
    ("mlp.lin1.*", "mlp.lin1.*", "mlp.lin1.*"),
    ("mlp.lin2.*", "mlp.lin2.*", "mlp.lin2.*"),
)
_SAM_TABLES = (
    ("attn.rel_pos_h", "attn.pos_h.weight", "attn.rel_pos_h"),
    ("attn.rel_pos_w", "attn.pos_w.weight", "attn.rel_pos_w"),
)


def _sam_layers() -> tuple[Rule, ...]:
    return tuple(
        rule
        for modules, keep in ((_SAM_MODULES, False), (_SAM_TABLES, True))
        for source, llama_cpp, ollama in modules
        for rule in towers.both(
            f"sam_model.blocks.{{n}}.{source}",
            f"v.sam.blk.{{n}}.{llama_cpp}",
            f"s.blk.{{n}}.{ollama}",
            only=_has_sam,
            keep=keep,
        )
    )


VISION = Conversion(
    serves=("DeepseekOCRForCausalLM",),
    architecture={LLAMA_CPP: "clip", OLLAMA: "deepseekocr"},
    keys=(
        Key("vision.block_count", "num_hidden_layers"),
        Key("vision.embedding_length", "hidden_size"),
        Key(
            "vision.feed_forward_length",
            lambda c: WIDENED * c.require_size("hidden_size"),
            flavours=(LLAMA_CPP,),
        ),
        Key("vision.attention.head_count", "num_attention_heads", flavours=(LLAMA_CPP,)),
        Key("vision.head_count", "num_attention_heads", flavours=(OLLAMA,)),
        Key("vision.patch_size", "patch_size"),
        towers.IMAGE_SIZE,
        *towers.clip("deepseekocr", STANDARD, eps=EPS),
        Key("use_gelu", lambda c: True, flavours=(LLAMA_CPP,)),
        Key(
            "vision.window_size",
            lambda c: _sam(c).get("window_size", WINDOW),
            flavours=(LLAMA_CPP,),
        ),
        *_of_sam("layers", "block_count"),
        *_of_sam("width", "embedding_length"),
        *_of_sam("heads", "head_count"),
        Key(
            "sam.global_attention_indexes",
            lambda c: _sam(c)["global_attn_indexes"],
            flavours=(OLLAMA,),
        ),
    ),
    rules=(
        *towers.both("sam_model.pos_embed", "v.sam.pos_embd.weight", "s.position_embd", keep=True),
        *towers.both(
            "sam_model.patch_embed.proj.*", "v.sam.patch_embd.*", "s.patch_embd.*", keep=True
        ),
        *_sam_layers(),
        *(
            rule
            for index in range(4)
            for rule in towers.both(
                f"sam_model.neck.{index}.*",
                f"v.sam.neck.{index}.*",
                f"s.neck.{index}.*",
                keep=True,
            )
        ),
        *(
            rule
            for name in ("net_2", "net_3")
            for rule in towers.both(
                f"sam_model.{name}.weight", f"v.sam.{name}.weight", f"s.{name}.weight", keep=True
            )
        ),
        Rule("vision_model.embeddings.class_embedding", "v.class_embd", keep=True),
        # Of CLIP alone, which nothing uses.
        Rule(
            "vision_model.embeddings.patch_embedding.weight", "v.patch_embd.weight", optional=True
        ),
        Rule(
            "vision_model.embeddings.position_embedding.weight",
            "v.position_embd.weight",
            keep=True,
        ),
        *towers.both("vision_model.pre_layrnorm.*", "v.pre_ln.*", "v.pre_layrnorm.*"),
        *towers.layers("vision_model.transformer.layers.{n}", _CLIP_MODULES),
        *towers.both("projector.layers.*", "mm.model.fc.*", "mm.layers.*"),
        *towers.both("image_newline", "v.image_newline", "mm.image_newline", keep=True),
        *towers.both("view_seperator", "v.view_seperator", "mm.view_seperator", keep=True),
    ),
    roots=("model.",),
    drop=towers.TEXT,
    spellings={
        "num_hidden_layers": "layers",
        "hidden_size": "width",
        "num_attention_heads": "heads",
    },
    check=checks.all_of(_linear, _as_many_layers),
    part=("vision_config", "width", CLIP),
)
