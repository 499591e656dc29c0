"""Seed-OSS: Llama with biases of queries, keys and values."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.block import BlockOptions
from model_zoo.layers.decoder import Decoder
from model_zoo.layers.rope import Pairs
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.text_sizes import TextSizes


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Files name the norm before the feed-forward `post_attention_norm`."""
    sizes = TextSizes.read(metadata)
    base = metadata.get_positive("rope.freq_base")
    rotary = read_rotary(w, metadata, pairs=Pairs.NEOX, key_dim=sizes.key_dim, base=base)
    block = BlockOptions(ffn_norm="post_attention_norm")
    layers = [
        attention_layer(w.scope("blk", i), sizes, i, rotary, block=block)
        for i in range(sizes.layers)
    ]
    return Decoder(w, sizes, layers)
