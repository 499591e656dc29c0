"""Jina's third text encoder: XLM-RoBERTa with rotary positions."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import post_norm_layer
from model_zoo.layers.feed_forward import FeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.stack import TextLayer
from model_zoo.layers.text_encoder import EncoderOptions, TextEncoder, embedding_norm
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.pointwise import gelu_erf

# As in JinaEmbeddingsV3Config of `transformers`.
DEFAULT_EPS, DEFAULT_BASE = 1e-5, 20_000.0
BIASED = (
    "attn_qkv", "attn_output", "attn_output_norm", "ffn_up", "ffn_down", "layer_output_norm",
)  # fmt: skip


def build_decoder(w: TensorScope, metadata: Metadata) -> TextEncoder:
    """BERT with rotary positions. The adapters of its tasks are files of their own."""
    eps = metadata.get_positive("attention.layer_norm_epsilon", DEFAULT_EPS)
    sizes = TextSizes.read(metadata, eps=eps)
    rotary = read_rotary(w, sizes, Pairs.NEOX, default_base=DEFAULT_BASE)
    layers = [_layer(w.scope("blk", i), sizes, i, rotary) for i in range(sizes.layers)]
    options = EncoderOptions(embedding_norm=embedding_norm(w, sizes))
    return TextEncoder(w, sizes, layers, options)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    w.need_biases(*BIASED)
    size = sizes.feed_forward[index]
    feed_forward = FeedForward(w, hidden=sizes.hidden, size=size, curve=gelu_erf)
    return post_norm_layer(w, sizes, index, rotary, feed_forward)
