"""Gemma 1 and CodeGemma."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, DecoderOptions, TextLayer
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import DEFAULT_BASE, read_rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.pointwise import gelu_mul


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """GeGLU and scaled embeddings. The norm weights in a file are those of the model plus one."""
    sizes = TextSizes.read(metadata)
    rotary = read_rotary(w, sizes, Pairs.NEOX, default_base=DEFAULT_BASE)
    layers = [_layer(w.scope("blk", i), sizes, i, rotary) for i in range(sizes.layers)]
    return Decoder(w, sizes, layers, DecoderOptions(embedding_scale=sizes.hidden**0.5))


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    size = sizes.feed_forward[index]
    feed_forward = GatedFeedForward(w, hidden=sizes.hidden, size=size, gated=gelu_mul)
    return attention_layer(w, sizes, index, rotary, feed_forward=feed_forward)
