"""GPT-2, StarCoder and the larger Granite Code models: learned positions, layer norms, biases
everywhere, and feed-forwards without gate."""

from dataclasses import replace

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.block import BlockOptions
from model_zoo.layers.decoder import Decoder, TextLayer, biased_output_norm
from model_zoo.layers.feed_forward import FeedForward
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.pointwise import gelu, gelu_erf

STARCODER = "starcoder"
BIASED = ("attn_qkv", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """StarCoder has one key head for all heads, and exact GELU instead of the approximation."""
    sizes = TextSizes.read(metadata, eps=metadata.get_positive("attention.layer_norm_epsilon"))
    layers = [_layer(w.scope("blk", i), sizes, i) for i in range(sizes.layers)]
    return Decoder(w, sizes, layers, replace(biased_output_norm(w, sizes), places=True))


def _layer(w: TensorScope, sizes: TextSizes, index: int) -> TextLayer:
    w.need_biases(*BIASED)
    size = sizes.feed_forward[index]
    curve = gelu_erf if sizes.metadata.architecture == STARCODER else gelu
    feed_forward = FeedForward(w, hidden=sizes.hidden, size=size, curve=curve)
    block = BlockOptions(layer_norms=True)
    return attention_layer(w, sizes, index, None, feed_forward=feed_forward, block=block)
