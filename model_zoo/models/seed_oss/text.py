"""Seed-OSS: Llama with biases of queries, keys and values."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.block import BlockOptions
from model_zoo.layers.decoder import Decoder, TextLayer, uniform_decoder
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.text_sizes import TextSizes


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Files name the norm before the feed-forward `post_attention_norm`."""
    return uniform_decoder(w, TextSizes.read(metadata), Pairs.NEOX, _layer)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    block = BlockOptions(ffn_norm="post_attention_norm")
    return attention_layer(w, sizes, index, rotary, block=block)
