"""Step 3.5: windows in most layers, which have more heads; gates of heads; leading dense layers,
then experts, some with bounds."""

from dataclasses import replace
from functools import partial

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import OutputGate, head_norms
from model_zoo.layers.attention_layer import alternating_layers, attention_layer
from model_zoo.layers.block import RowWise
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.draft_layers import without_draft_layers
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.leading_dense import SIGMOID, stated_experts
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import plain_frequencies, read_rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.experts import limited_swiglu
from runtime.kernels.pointwise import Gate, silu_mul
from runtime.kv.cache_kinds import CacheKind, Full, Sliding

NEAR_BASE = "rope.freq_base_swa"
EXPERT_LIMITS, SHARED_LIMITS = "swiglu_clamp_exp", "swiglu_clamp_shexp"


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """The file lists the layers with a window, and the heads and bounds of each layer."""
    sizes = without_draft_layers(w, TextSizes.read(metadata))
    window = Sliding(metadata.require_size("attention.sliding_window"))
    near, far = (window, _near(w, sizes)), (Full(), _far(w, sizes))
    metadata.require_array("attention.sliding_window_pattern", bool)
    slides = sizes.sliding_layers(0)
    return Decoder(w, sizes, alternating_layers(w, sizes, slides, _layer, near=near, far=far))


def _near(w: TensorScope, sizes: TextSizes) -> Rotary:
    base = sizes.metadata.get_positive(NEAR_BASE)
    return Rotary(plain_frequencies(sizes.key_dim, base).to(w.device), Pairs.NEOX)


def _far(w: TensorScope, sizes: TextSizes) -> Rotary:
    """Half of each head is rotated. As in llama.cpp, `rope.dimension_count` states the whole head,
    and `rope_freqs` has factors of its frequencies, of which the half has every second; llama.cpp
    takes the first ones."""
    whole = sizes.metadata.get_size("rope.dimension_count", sizes.key_dim)
    if whole != sizes.key_dim or whole % 4:
        raise sizes.metadata.error(
            "rope.dimension_count", f"is {whole}; it must be {sizes.key_dim}, a multiple of 4"
        )
    return read_rotary(w, sizes, Pairs.NEOX, dim=whole // 2, factors_of=whole)


def _layer(
    w: TensorScope, sizes: TextSizes, index: int, kind: CacheKind, rotary: Rotary | None
) -> TextLayer:
    return attention_layer(
        w,
        sizes,
        index,
        rotary,
        kind=kind,
        attention=replace(head_norms(w, sizes), output_gate=OutputGate.OF_HEADS),
        feed_forward=_feed_forward(w, sizes, index),
    )


def _feed_forward(w: TensorScope, sizes: TextSizes, index: int) -> RowWise:
    """Layers without a router are dense, with the bounds of shared experts."""
    gated, shared_gated = (_gate(sizes, index, key) for key in (EXPERT_LIMITS, SHARED_LIMITS))
    if not w.has("ffn_gate_inp"):
        size = sizes.feed_forward[index]
        return GatedFeedForward(w, hidden=sizes.hidden, size=size, gated=shared_gated)
    return stated_experts(
        w, sizes, scores=SIGMOID, renormalised=True, gated=gated, shared_gated=shared_gated
    )


def _gate(sizes: TextSizes, index: int, key: str) -> Gate:
    """SwiGLU, with the bound that the file states for this layer; 0 means none."""
    limits = sizes.metadata.get_array(key, float) or (0.0,) * sizes.layers
    if len(limits) < sizes.layers or limits[index] < 0:
        raise sizes.metadata.error(key, f"has no bound of 0 or more for layer {index}")
    return partial(limited_swiglu, limit=limits[index]) if limits[index] else silu_mul
