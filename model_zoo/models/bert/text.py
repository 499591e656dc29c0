"""BERT and its descendants: encoders that compute embeddings of texts."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import post_norm_layer
from model_zoo.layers.feed_forward import FeedForward
from model_zoo.layers.stack import TextLayer
from model_zoo.layers.text_encoder import EncoderOptions, TextEncoder, embedding_norm
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.pointwise import gelu_erf

# As in BertConfig of `transformers`; converters omit the key if settings lack it.
DEFAULT_EPS = 1e-12
BIASED = (
    "attn_qkv", "attn_q", "attn_k", "attn_v", "attn_output", "attn_output_norm", "ffn_up",
    "ffn_down", "layer_output_norm",
)  # fmt: skip


def build_decoder(w: TensorScope, metadata: Metadata) -> TextEncoder:
    """Learned positions, biases everywhere, exact GELU, norms after the residual sums."""
    eps = metadata.get_positive("attention.layer_norm_epsilon", DEFAULT_EPS)
    sizes = TextSizes.read(metadata, eps=eps)
    layers = [_layer(w.scope("blk", i), sizes, i) for i in range(sizes.layers)]
    options = EncoderOptions(places=True, embedding_norm=embedding_norm(w, sizes))
    return TextEncoder(w, sizes, layers, options)


def _layer(w: TensorScope, sizes: TextSizes, index: int) -> TextLayer:
    w.need_biases(*BIASED)
    size = sizes.feed_forward[index]
    feed_forward = FeedForward(w, hidden=sizes.hidden, size=size, curve=gelu_erf)
    return post_norm_layer(w, sizes, index, None, feed_forward)
