"""Jina's second text encoder: BERT whose scores fall with distance, and a gated feed-forward."""

from dataclasses import replace

from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import falling_scores
from model_zoo.layers.attention_layer import post_norm_layer
from model_zoo.layers.feed_forward import FeedForward, GatedFeedForward
from model_zoo.layers.norm import AcrossHeads
from model_zoo.layers.stack import TextLayer
from model_zoo.layers.text_encoder import EncoderOptions, TextEncoder, embedding_norm
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.pointwise import gelu_erf, gelu_erf_mul

# As in the settings of all models.
DEFAULT_EPS = 1e-12
BIASED = (
    "attn_q", "attn_k", "attn_v", "attn_output", "attn_output_norm", "ffn_down",
    "layer_output_norm",
)  # fmt: skip


def build_decoder(w: TensorScope, metadata: Metadata) -> TextEncoder:
    """BERT without embeddings of positions. Files of the model for code also have norms of all
    queries and keys of a layer, and a second norm after attention."""
    eps = metadata.get_positive("attention.layer_norm_epsilon", DEFAULT_EPS)
    sizes = TextSizes.read(metadata, eps=eps)
    layers = [_layer(w.scope("blk", i), sizes, i) for i in range(sizes.layers)]
    options = EncoderOptions(embedding_norm=embedding_norm(w, sizes))
    return TextEncoder(w, sizes, layers, options)


def _layer(w: TensorScope, sizes: TextSizes, index: int) -> TextLayer:
    w.need_biases(*BIASED)
    options = replace(
        falling_scores(sizes, index, w.device),
        q_norm=_across(w, "attn_q_norm", sizes),
        k_norm=_across(w, "attn_k_norm", sizes),
    )
    second = w.has("attn_norm_2")
    return post_norm_layer(
        w,
        sizes,
        index,
        None,
        _feed_forward(w, sizes, index),
        attention=options,
        attn_norm_2=w.layer_norm("attn_norm_2", sizes.eps, size=sizes.hidden) if second else None,
    )


def _across(w: TensorScope, name: str, sizes: TextSizes) -> AcrossHeads | None:
    return AcrossHeads(w.layer_norm(name, sizes.eps, size=sizes.hidden)) if w.has(name) else None


def _feed_forward(w: TensorScope, sizes: TextSizes, index: int) -> GatedFeedForward | FeedForward:
    """GeGLU; older files have gates and ups apart, newer ones as one tensor, in the model's order:
    that for code, which alone has norms of queries, has the ups first. Models with the setting
    `feed_forward_type` original have no gates."""
    hidden, size = sizes.hidden, sizes.feed_forward[index]
    if w.has("ffn_gate"):
        return GatedFeedForward(w, hidden=hidden, size=size, gated=gelu_erf_mul)
    if w.shape("ffn_up") == (size, hidden):
        w.need_biases("ffn_up")
        return FeedForward(w, hidden=hidden, size=size, curve=gelu_erf)
    gated = _mul_gelu_erf if w.has("attn_q_norm") else gelu_erf_mul
    return GatedFeedForward(w, hidden=hidden, size=size, gated=gated, whole="ffn_up")


def _mul_gelu_erf(up: Tensor, gate: Tensor) -> Tensor:
    return gelu_erf_mul(gate, up)
