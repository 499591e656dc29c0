"""DeepSeek-OCR and DeepSeek-OCR 2: conversion of vision checkpoints to GGUF."""

from dataclasses import replace

from model_zoo.convert import checks, towers
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, Conversion, Key, Rule
from model_zoo.images.normalise import STANDARD
from model_zoo.layers.vision.vision_sizes import KV_HEADS_KEY
from model_zoo.models.deepseekocr.vision import EPS, TILES
from model_zoo.models.deepseekocr.vision_2 import EPS as READER_EPS
from model_zoo.models.deepseekocr.vision_2 import IMAGE_END, QUERIES, ROPE_BASE, SECOND_TILES
from model_zoo.multimodal.image_settings import LEAST_TILES_KEY, MOST_TILES_KEY
from runtime.errors import UnsupportedModelError

CLIP, SAM, QWEN = "clip-l-14-224", "sam_vit_b", "qwen2-0-5b"
# Settings that no checkpoint of the authors states.
WIDENED = 4
SAM_SIZES = {"image_size": 1024, "patch_size": 16, "window_size": 14}
QWEN_SIZES = {
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
SPELLINGS = {
    "num_hidden_layers": "layers",
    "hidden_size": "width",
    "num_attention_heads": "heads",
}


def _sam(config: Configuration) -> Configuration:
    """The settings of the first encoder, as the authors spell them or as `transformers` does."""
    vision = config.model.of_part("vision_config")
    own = vision.of_part(*(("sam_config",) if "sam_config" in vision.whole else ("width", SAM)))
    return own.of_family(defaults=SAM_SIZES, spellings=SPELLINGS)


def _of_sam(name: str, setting: str) -> tuple[Key, ...]:
    """Keys of the first encoder, by flavour."""
    keys = ((LLAMA_CPP, f"vision.sam.{name}"), (OLLAMA, f"sam.{name}"))
    return tuple(
        Key(key, lambda c: _sam(c).require_size(setting), flavours=(flavour,))
        for flavour, key in keys
    )


def _has_sam(config: Configuration, layer: int) -> bool:
    """Whether the first encoder has such a layer."""
    return layer < _sam(config).layers


def _linear(config: Configuration) -> None:
    kind = config.model.of_part("projector_config").get("projector_type")
    if kind != "linear":
        raise UnsupportedModelError(
            f"{config.path}: `projector_type` is {str(kind)[:80]}; files of this architecture mean "
            "linear."
        )


def _as_many_layers(config: Configuration) -> None:
    if _sam(config).layers > config.layers:
        raise config.error("has more layers in SAM's encoder than in the second one")


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


def _sam_rules() -> tuple[Rule, ...]:
    layers = tuple(
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
    kept = (
        ("pos_embed", "pos_embd.weight", "position_embd"),
        ("patch_embed.proj.*", "patch_embd.*", "patch_embd.*"),
        *((f"neck.{index}.*",) * 3 for index in range(4)),
        *((f"{name}.weight",) * 3 for name in ("net_2", "net_3")),
    )
    others = (
        rule
        for source, llama_cpp, ollama in kept
        for rule in towers.both(
            f"sam_model.{source}", f"v.sam.{llama_cpp}", f"s.{ollama}", keep=True
        )
    )
    return (*layers, *others)


def _tile_keys(tiles: tuple[int, int]) -> tuple[Key, Key]:
    """Written because llama.cpp's files state them; checkpoints do not."""
    least, most = tiles
    return (
        Key(LEAST_TILES_KEY, lambda c: least, flavours=(LLAMA_CPP,)),
        Key(MOST_TILES_KEY, lambda c: most, flavours=(LLAMA_CPP,)),
    )


SAM_KEYS = (
    *_of_sam("block_count", "num_hidden_layers"),
    *_of_sam("embedding_length", "hidden_size"),
    *_of_sam("head_count", "num_attention_heads"),
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
            lambda c: _sam(c).require_size("window_size"),
            flavours=(LLAMA_CPP,),
        ),
        *SAM_KEYS,
        *_tile_keys(TILES),
        Key(
            "sam.global_attention_indexes",
            lambda c: _sam(c).require("global_attn_indexes"),
            flavours=(OLLAMA,),
        ),
    ),
    rules=(
        *_sam_rules(),
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
    spellings=SPELLINGS,
    check=checks.all_of(_linear, _as_many_layers),
    part=("vision_config", "width", CLIP),
)

_QWEN2_MODULES = (
    ("input_layernorm", "ln1"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_out"),
    ("post_attention_layernorm", "ln2"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
)


SECOND_VISION = Conversion(
    serves=("DeepseekOcr2ForConditionalGeneration",),
    architecture={LLAMA_CPP: "clip"},
    keys=(
        Key("vision.block_count", "num_hidden_layers"),
        Key("vision.embedding_length", "hidden_size"),
        Key("vision.feed_forward_length", "intermediate_size"),
        Key("vision.attention.head_count", "num_attention_heads"),
        Key(KV_HEADS_KEY, "num_key_value_heads"),
        Key("vision.patch_size", lambda c: _sam(c).require_size("patch_size")),
        Key("vision.image_size", lambda c: _sam(c).require_size("image_size")),
        *towers.clip("deepseekocr2", STANDARD, eps="rms_norm_eps"),
        Key("use_gelu", lambda c: True),  # in the first encoder
        Key("vision.window_size", lambda c: _sam(c).require_size("window_size")),
        *SAM_KEYS,
        *_tile_keys(SECOND_TILES),
    ),
    rules=(
        *_sam_rules(),
        *(
            Rule(f"qwen2_model.{name}.weight", f"v.{kept}.weight", keep=True)
            for name, kept in zip(("query_768", "query_1024"), QUERIES, strict=True)
        ),
        *towers.layers("qwen2_model.model.model.layers.{n}", _QWEN2_MODULES),
        Rule("qwen2_model.model.model.norm.*", "v.post_ln.*"),
        Rule("projector.layers.*", "mm.model.fc.*"),
        Rule("view_seperator", IMAGE_END, keep=True),
    ),
    roots=("model.",),
    drop=towers.TEXT,
    defaults={"rms_norm_eps": READER_EPS},
    check=checks.all_of(
        towers.known_setting("hidden_act", "silu"),
        towers.known_setting("use_sliding_window", False),
        towers.known_rope_base(ROPE_BASE),
        _as_many_layers,
    ),
    part=("vision_config", "encoder_config"),
)
AUTHORS_SECOND_VISION = replace(
    SECOND_VISION,
    serves=("DeepseekOCR2ForCausalLM",),
    defaults={**SECOND_VISION.defaults, **QWEN_SIZES},
    spellings={"hidden_size": "dim"},
    check=checks.all_of(_linear, _as_many_layers),
    part=("vision_config", "width", QWEN),
)
