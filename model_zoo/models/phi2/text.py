"""Phi 1, 1.5 and 2: attention and a feed-forward without gate in parallel after one layer norm."""

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
from runtime.kernels.pointwise import gelu

BIASED = (
    "attn_norm", "attn_qkv", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down",
)  # fmt: skip


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """A part of each head is rotated. llama.cpp's converter does not state the base of rotation.
    The head has a bias, too."""
    sizes = TextSizes.read(metadata, eps=metadata.get_positive("attention.layer_norm_epsilon"))
    w.need_biases("output")
    options = replace(biased_output_norm(w, sizes), own_head=True)
    return uniform_decoder(w, sizes, Pairs.NEOX, _layer, default_base=DEFAULT_BASE, options=options)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    w.need_biases(*BIASED)
    size = sizes.feed_forward[index]
    feed_forward = FeedForward(w, hidden=sizes.hidden, size=size, curve=gelu)
    block = ParallelOptions()
    return attention_layer(w, sizes, index, rotary, feed_forward=feed_forward, block=block)
