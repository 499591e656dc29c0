"""Jais 2: layer norms, and feed-forwards without gate whose activation is squared ReLU."""

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
    """Published models have biases in all matrices."""
    sizes = TextSizes.read(metadata, eps=metadata.get_positive("attention.layer_norm_epsilon"))
    options = biased_output_norm(w, sizes)
    return uniform_decoder(w, sizes, Pairs.NEOX, _layer, options=options)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    size = sizes.feed_forward[index]
    feed_forward = FeedForward(w, hidden=sizes.hidden, size=size, curve=relu_squared)
    block = BlockOptions(layer_norms=True)
    return attention_layer(w, sizes, index, rotary, feed_forward=feed_forward, block=block)
