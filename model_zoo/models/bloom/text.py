"""BLOOM: scores that fall with distance instead of positions, a norm of the embeddings, layer
norms, biases everywhere, no gates."""

from dataclasses import replace

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import falling_scores
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.block import BlockOptions
from model_zoo.layers.decoder import Decoder, TextLayer, biased_output_norm
from model_zoo.layers.feed_forward import FeedForward
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.pointwise import gelu

BIASED = ("attn_qkv", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    sizes = TextSizes.read(metadata, eps=metadata.get_positive("attention.layer_norm_epsilon"))
    layers = [_layer(w.scope("blk", i), sizes, i) for i in range(sizes.layers)]
    w.need_biases("token_embd_norm")
    norm = w.layer_norm("token_embd_norm", sizes.eps, size=sizes.hidden)
    return Decoder(w, sizes, layers, replace(biased_output_norm(w, sizes), embedding_norm=norm))


def _layer(w: TensorScope, sizes: TextSizes, index: int) -> TextLayer:
    w.need_biases(*BIASED)
    size = sizes.feed_forward[index]
    return attention_layer(
        w,
        sizes,
        index,
        None,
        attention=falling_scores(sizes, index, w.device),
        feed_forward=FeedForward(w, hidden=sizes.hidden, size=size, curve=gelu),
        block=BlockOptions(layer_norms=True),
    )
