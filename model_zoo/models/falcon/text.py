"""Falcon 7B, 40B and 180B, and Falcon 2: attention and a feed-forward without gate in parallel."""

from dataclasses import replace

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.block import ParallelOptions
from model_zoo.layers.decoder import Decoder, TextLayer, biased_output_norm, uniform_decoder
from model_zoo.layers.feed_forward import FeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import DEFAULT_BASE
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.pointwise import gelu_erf

# `rope_theta` and `max_position_embeddings` in config.json of tiiuae/falcon-11B.
FALCON_2_BASE, FALCON_2_CONTEXT = 500_042.0, 8192


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """llama.cpp's converter does not state the base of rotation, and 2,048 as every context."""
    sizes = TextSizes.read(metadata, eps=metadata.get_positive("attention.layer_norm_epsilon"))
    base = DEFAULT_BASE
    if _is_falcon_2(w, sizes) and not metadata.has("rope.freq_base"):
        base, sizes = FALCON_2_BASE, replace(sizes, context_length=FALCON_2_CONTEXT)
    options = biased_output_norm(w, sizes)
    return uniform_decoder(w, sizes, Pairs.NEOX, _layer, default_base=base, options=options)


def _is_falcon_2(w: TensorScope, sizes: TextSizes) -> bool:
    """Its heads share keys in groups, with one norm for attention and feed-forward. In Falcon 7B,
    all heads share one key; Falcon 40B and 180B have two norms."""
    grouped = 1 < sizes.kv_heads[0] < sizes.heads[0]
    return grouped and not w.has("blk.0.attn_norm_2")


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    """In the larger models, attention has a norm of its own, `attn_norm_2`."""
    w.need_biases("attn_norm", "attn_norm_2")
    size = sizes.feed_forward[index]
    feed_forward = FeedForward(w, hidden=sizes.hidden, size=size, curve=gelu_erf)
    two = w.has("attn_norm_2")
    block = ParallelOptions("attn_norm_2", "attn_norm") if two else ParallelOptions()
    return attention_layer(w, sizes, index, rotary, feed_forward=feed_forward, block=block)
