"""Gemma 1 and CodeGemma."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, DecoderOptions, TextLayer, uniform_decoder
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import DEFAULT_BASE
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.pointwise import gelu_mul


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """GeGLU and scaled embeddings. The norm weights in a file are those of the model plus one."""
    sizes = TextSizes.read(metadata)
    scaled = DecoderOptions(embedding_scale=sizes.hidden**0.5)
    return uniform_decoder(w, sizes, Pairs.NEOX, _layer, default_base=DEFAULT_BASE, options=scaled)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    size = sizes.feed_forward[index]
    feed_forward = GatedFeedForward(w, hidden=sizes.hidden, size=size, gated=gelu_mul)
    return attention_layer(w, sizes, index, rotary, feed_forward=feed_forward)
