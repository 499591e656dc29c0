"""Nomic's text encoders: BERT with rotary positions, and gated feed-forwards or experts."""

from dataclasses import replace

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import post_norm_layer
from model_zoo.layers.block import RowWise
from model_zoo.layers.experts import ExpertOptions, Experts, ExpertSizes
from model_zoo.layers.feed_forward import FeedForward, GatedFeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.routing import SOFTMAX_OF_ALL
from model_zoo.layers.stack import TextLayer
from model_zoo.layers.text_encoder import EncoderOptions, TextEncoder, embedding_norm
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.pointwise import gelu_erf

# As in NomicBertConfig of `transformers`. Nomic's settings call the base `rotary_emb_base`.
# Ollama's converter reads `rope_theta` instead and so omits the key; its loader has this default.
DEFAULT_EPS, DEFAULT_BASE = 1e-12, 1000.0
# As in the only model with experts, nomic-embed-text-v2-moe.
DEFAULT_BASE_MOE = 10_000.0
MOE = "nomic-bert-moe"
MOE_BIASED = ("attn_qkv", "attn_output")


def build_decoder(w: TensorScope, metadata: Metadata) -> TextEncoder:
    """BERT with rotary positions. Its feed-forwards are gated; in the architecture with experts,
    plain, or experts in the second of every `moe_every_n_layers` layers."""
    eps = metadata.get_positive("attention.layer_norm_epsilon", DEFAULT_EPS)
    sizes = TextSizes.read(metadata, eps=eps)
    base = DEFAULT_BASE_MOE if metadata.architecture == MOE else DEFAULT_BASE
    rotary = read_rotary(w, sizes, Pairs.NEOX, default_base=base)
    layers = [_layer(w.scope("blk", i), sizes, i, rotary) for i in range(sizes.layers)]
    options = EncoderOptions(embedding_norm=embedding_norm(w, sizes))
    return TextEncoder(w, sizes, layers, options)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    w.need_biases("attn_output_norm", "layer_output_norm")
    return post_norm_layer(w, sizes, index, rotary, _feed_forward(w, sizes, index))


def _feed_forward(w: TensorScope, sizes: TextSizes, index: int) -> RowWise:
    size, metadata = sizes.feed_forward[index], sizes.metadata
    if metadata.architecture != MOE:
        return GatedFeedForward(w, hidden=sizes.hidden, size=size)
    w.need_biases(*MOE_BIASED)
    if index % metadata.require_size("moe_every_n_layers") != 1:
        w.need_biases("ffn_up", "ffn_down")
        return FeedForward(w, hidden=sizes.hidden, size=size, curve=gelu_erf)
    counts = replace(ExpertSizes.read(metadata), width=size)
    options = ExpertOptions(routing=SOFTMAX_OF_ALL, curve=gelu_erf)
    return Experts(w, sizes.hidden, counts, options)
