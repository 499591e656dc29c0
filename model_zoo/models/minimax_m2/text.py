"""MiniMax M2: experts in every layer; queries and keys are normed across all heads."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import norms_across_heads
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.leading_dense import SIGMOID, stated_experts
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.text_sizes import TextSizes


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """`rope.dimension_count` states how much of a head is rotated."""
    sizes = TextSizes.read(metadata)
    base = metadata.get_positive("rope.freq_base")
    rotary = read_rotary(w, metadata, pairs=Pairs.NEOX, key_dim=sizes.key_dim, base=base)
    layers = [_layer(w.scope("blk", i), sizes, i, rotary) for i in range(sizes.layers)]
    return Decoder(w, sizes, layers)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    return attention_layer(
        w,
        sizes,
        index,
        rotary,
        attention=norms_across_heads(w, sizes, index),
        feed_forward=stated_experts(w, sizes, scores=SIGMOID, renormalised=True),
    )
