"""Nemotron 4 and Minitron: layer norms, and feed-forwards without gate whose activation is squared
ReLU."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.block import BlockOptions
from model_zoo.layers.decoder import Decoder, TextLayer, biased_output_norm, uniform_decoder
from model_zoo.layers.feed_forward import FeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.pointwise import relu_squared


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """A part of each head is rotated. Files have the weights of norms plus one."""
    sizes = TextSizes.read(metadata, eps=metadata.get_positive("attention.layer_norm_epsilon"))
    options = biased_output_norm(w, sizes)
    return uniform_decoder(w, sizes, Pairs.NEOX, _layer, dim=_rotated(sizes), options=options)


def _rotated(sizes: TextSizes) -> int | None:
    """The number of rotated dimensions of a head: in published models half of them, for which
    llama.cpp's converter states half of hidden / heads. In Minitron 8B, whose 48 heads of 128 are
    wider than the hidden 4,096, these differ."""
    stated = sizes.metadata.get("rope.dimension_count", int, sizes.key_dim)
    return sizes.key_dim // 2 if stated == sizes.hidden // sizes.heads[0] // 2 else None


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    size = sizes.feed_forward[index]
    feed_forward = FeedForward(w, hidden=sizes.hidden, size=size, curve=relu_squared)
    block = BlockOptions(layer_norms=True)
    return attention_layer(w, sizes, index, rotary, feed_forward=feed_forward, block=block)
