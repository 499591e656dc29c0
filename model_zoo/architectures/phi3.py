"""Phi 3, 3.5 and 4."""

import math

import torch
from torch import Tensor

from model_zoo.conversion import checks, decoders
from model_zoo.conversion.configuration import Configuration
from model_zoo.conversion.mapping import Computed, Conversion, Key, Rule
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import SelfAttention
from model_zoo.layers.block import Block, read_block
from model_zoo.layers.decoder import Decoder, Layer
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.rope import Pairs
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.sizes import Sizes
from runtime.kv.spec import CacheKind, Full, LayerCache, Sliding

# The window of Phi-3-mini-4k and Phi-3-medium-4k, by layers and context length. llama.cpp's first
# converters omitted the key; its loader had the same default for them.
WINDOW, WINDOWED_LAYERS, WINDOWED_CONTEXT = 2047, (32, 40), 4096
# What the family has called its one way of scaling.
_LONGROPE = ("longrope", "su", "yarn")


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Queries, keys and values are one tensor, gate and up another; all layers see a window, or
    none does."""
    sizes = Sizes.read(metadata)
    original = metadata.get("rope.scaling.original_context_length", int, sizes.context_length)
    rotary = read_rotary(
        w,
        metadata,
        pairs=Pairs.HALVES,
        key_dim=sizes.key_dim,
        kind="longrope" if original < sizes.context_length else None,
    )
    window = metadata.get("attention.sliding_window", int, _usual_window(sizes))
    kind: CacheKind = Sliding(window) if window > 0 else Full()
    layers = []
    for index in range(sizes.layers):
        cache = sizes.cache(index, kind)
        layers.append(Layer(_block(w.scope("blk", index), sizes, index, cache), cache, rotary))
    return Decoder(w, sizes, layers)


def _usual_window(sizes: Sizes) -> int:
    """The window of files without the key; 0 for none, as in models with longer contexts."""
    windowed = sizes.layers in WINDOWED_LAYERS and sizes.context_length == WINDOWED_CONTEXT
    return WINDOW if windowed else 0


def _block(w: TensorScope, sizes: Sizes, index: int, cache: LayerCache) -> Block:
    attention = SelfAttention(
        w, hidden=sizes.hidden, heads=sizes.heads[index], cache=cache, scale=sizes.key_dim**-0.5
    )
    feed_forward = GatedFeedForward(
        w, hidden=sizes.hidden, size=sizes.feed_forward[index], whole="ffn_up"
    )
    return read_block(w, sizes, attention, feed_forward)


def _is_long(config: Configuration) -> bool:
    return config.rope()["rope_type"] in _LONGROPE


def _original_context(config: Configuration) -> int | None:
    return config.require_size("original_max_position_embeddings") if _is_long(config) else None


def _attention_factor(config: Configuration) -> float | None:
    """What cosines and sines are multiplied by; Ding et al., "LongRoPE"."""
    if not _is_long(config):
        return None
    stated = config.rope().get("attention_factor")
    if stated is not None:
        return float(stated)
    original = config.require_size("original_max_position_embeddings")
    growth = config.require_size("max_position_embeddings") / original
    return math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1 else 1.0


def _factors(name: str) -> Computed:
    def make(config: Configuration) -> Tensor | None:
        if not _is_long(config):
            return None
        factors = torch.tensor(config.rope().get(f"{name}_factor") or (), dtype=torch.float32)
        if len(factors) != decoders.rotated_size(config) // 2:
            raise config.error(f"has {len(factors)} numbers as `{name}_factor`")
        return factors

    return Computed(f"rope_factors_{name}.weight", make)


CONVERSION = Conversion(
    serves=("Phi3ForCausalLM",),
    architecture="phi3",
    keys=(
        *decoders.KEYS,
        Key("attention.sliding_window", "sliding_window", optional=True),
        Key("rope.scaling.original_context_length", _original_context, optional=True),
        Key("rope.scaling.attn_factor", _attention_factor, optional=True),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        Rule("layers.{n}.self_attn.qkv_proj.weight", "blk.{n}.attn_qkv.weight"),
        Rule("layers.{n}.self_attn.o_proj.weight", "blk.{n}.attn_output.weight"),
        Rule("layers.{n}.mlp.gate_up_proj.weight", "blk.{n}.ffn_up.weight"),
        Rule("layers.{n}.mlp.down_proj.weight", "blk.{n}.ffn_down.weight"),
        *decoders.PRE_NORMS,
    ),
    computed=(_factors("long"), _factors("short")),
    drop=decoders.BUFFERS,
    check=checks.only_scalings(*_LONGROPE),
)
