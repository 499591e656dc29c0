"""BERT and its many descendants that turn texts into vectors."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import SelfAttention
from model_zoo.layers.block import PostNormBlock
from model_zoo.layers.encoder import Encoder
from model_zoo.layers.feed_forward import FeedForward
from model_zoo.layers.sizes import Sizes
from model_zoo.layers.stack import Layer
from runtime.kernels.pointwise import gelu_erf
from runtime.kv.spec import Full

# As in BertConfig of `transformers`; converters omit the key if settings lack it.
DEFAULT_EPS = 1e-12
BIASED = (
    "attn_qkv", "attn_q", "attn_k", "attn_v", "attn_output", "attn_output_norm", "ffn_up",
    "ffn_down", "layer_output_norm",
)  # fmt: skip


def build_decoder(w: TensorScope, metadata: Metadata) -> Encoder:
    """Learned positions, biases everywhere, GELU as its authors have it, norms behind the sums."""
    eps = metadata.get_positive("attention.layer_norm_epsilon", DEFAULT_EPS)
    sizes = Sizes.read(metadata, eps=eps)
    layers = [_layer(w.scope("blk", i), sizes, i) for i in range(sizes.layers)]
    return Encoder(w, sizes, layers, places=True)


def _layer(w: TensorScope, sizes: Sizes, index: int) -> Layer:
    w.need_biases(*BIASED)
    cache = sizes.cache(index, Full())
    attention = SelfAttention(
        w, hidden=sizes.hidden, heads=sizes.heads[index], cache=cache, scale=sizes.key_dim**-0.5
    )
    block = PostNormBlock(
        attention,
        w.layer_norm("attn_output_norm", sizes.eps, size=sizes.hidden),
        FeedForward(w, hidden=sizes.hidden, size=sizes.feed_forward[index], curve=gelu_erf),
        w.layer_norm("layer_output_norm", sizes.eps, size=sizes.hidden),
    )
    return Layer(block, cache)
