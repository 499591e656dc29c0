"""Laguna: windows in most layers, with a number of heads and a rotation of their own; softplus
gates per head or per element; leading dense layers, then experts and a shared one."""

from dataclasses import replace

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import AttentionOptions, OutputGate, head_norms
from model_zoo.layers.attention_layer import alternating_layers, attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.leading_dense import SIGMOID, leading_dense_or_experts
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import plain_frequencies, read_rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.pointwise import softplus_mul
from runtime.kv.cache_kinds import CacheKind, Full

FULL_EVERY = 4  # beginning with the first layer, as in llama.cpp
NEAR_BASE, NEAR_SIZE = "rope.freq_base_swa", "rope.dimension_count_swa"


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Layers with a window have no rope scaling. In files without a window, no layer has one."""
    sizes = TextSizes.read(metadata)
    far, window = (Full(), read_rotary(w, sizes, Pairs.NEOX)), sizes.window()
    near = far if window == Full() else (window, _near(w, sizes))
    slides = sizes.sliding_layers(FULL_EVERY, full=0)
    return Decoder(w, sizes, alternating_layers(w, sizes, slides, _layer, near=near, far=far))


def _near(w: TensorScope, sizes: TextSizes) -> Rotary:
    metadata = sizes.metadata
    base = metadata.get_positive(NEAR_BASE, metadata.get_positive("rope.freq_base"))
    rotated = metadata.get_size(NEAR_SIZE, sizes.key_dim, at_most=sizes.key_dim)
    if rotated % 2:
        raise metadata.error(NEAR_SIZE, f"is {rotated}; it must be even")
    return Rotary(plain_frequencies(rotated, base).to(w.device), Pairs.NEOX)


def _layer(
    w: TensorScope, sizes: TextSizes, index: int, kind: CacheKind, rotary: Rotary | None
) -> TextLayer:
    experts = leading_dense_or_experts(w, sizes, index, scores=SIGMOID, renormalised=True)
    options = _gated(w, sizes, index)
    return attention_layer(
        w, sizes, index, rotary, kind=kind, attention=options, feed_forward=experts
    )


def _gated(w: TensorScope, sizes: TextSizes, index: int) -> AttentionOptions:
    """The number of gates in the file shows whether there is one per head or per element."""
    shape = w.shape("attn_gate", dimensions=2)
    of_heads = shape is not None and shape[0] == sizes.heads[index]
    place = OutputGate.OF_HEADS if of_heads else OutputGate.APART
    return replace(head_norms(w, sizes), output_gate=place, gate=softplus_mul)
