"""Falcon 7B, 40B and 180B, and Falcon 2: attention and a feed-forward without gate in parallel."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import parallel_layer
from model_zoo.layers.decoder import Decoder, TextLayer, biased_output_norm, uniform_decoder
from model_zoo.layers.feed_forward import FeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import DEFAULT_BASE
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.pointwise import gelu_erf


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """llama.cpp's converter does not state the base of rotation."""
    sizes = TextSizes.read(metadata, eps=metadata.get_positive("attention.layer_norm_epsilon"))
    options = biased_output_norm(w, sizes)
    return uniform_decoder(w, sizes, Pairs.NEOX, _layer, default_base=DEFAULT_BASE, options=options)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    """In the larger models, attention has a norm of its own, `attn_norm_2`."""
    w.need_biases("attn_norm", "attn_norm_2")
    size = sizes.feed_forward[index]
    feed_forward = FeedForward(w, hidden=sizes.hidden, size=size, curve=gelu_erf)
    two = w.has("attn_norm_2")
    return parallel_layer(
        w,
        sizes,
        index,
        rotary,
        feed_forward=feed_forward,
        norm="attn_norm_2" if two else "attn_norm",
        ffn_norm="attn_norm" if two else None,
    )
