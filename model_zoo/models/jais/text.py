"""Jais 1: scores that fall with distance instead of positions, layer norms, biases everywhere, and
scores that are divided by the size of heads."""

from dataclasses import replace

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import falling_scores
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.block import BlockOptions
from model_zoo.layers.decoder import Decoder, TextLayer, biased_output_norm
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.text_sizes import TextSizes

BIASED = (
    "attn_qkv", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down",
)  # fmt: skip


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Converters have multiplied embedding and head by the model's scales."""
    sizes = TextSizes.read(metadata, eps=metadata.get_positive("attention.layer_norm_epsilon"))
    layers = [_layer(w.scope("blk", i), sizes, i) for i in range(sizes.layers)]
    options = replace(biased_output_norm(w, sizes), own_head=True)
    return Decoder(w, sizes, layers, options)


def _layer(w: TensorScope, sizes: TextSizes, index: int) -> TextLayer:
    w.need_biases(*BIASED)
    most = sizes.metadata.get_positive("attention.max_alibi_bias", 8.0)
    falling = falling_scores(sizes, index, w.device, most=most)
    return attention_layer(
        w,
        sizes,
        index,
        None,
        attention=replace(falling, scale=1 / sizes.key_dim),
        feed_forward=GatedFeedForward(w, hidden=sizes.hidden, size=sizes.feed_forward[index]),
        block=BlockOptions(layer_norms=True),
    )
