"""The usual layers of a text decoder: self-attention and a feed-forward, one after the other or
beside it."""

from functools import partial

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import AttentionOptions, SelfAttention
from model_zoo.layers.block import BlockOptions, ParallelBlock, RowWise, read_block
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.rope import Rotary
from model_zoo.layers.stack import TextLayer
from model_zoo.layers.text_sizes import TextSizes
from runtime.kv.spec import CacheKind, Full


def attention_layer(
    w: TensorScope,
    sizes: TextSizes,
    index: int,
    rotary: Rotary | None,
    *,
    kind: CacheKind | None = None,
    attention: AttentionOptions | None = None,
    feed_forward: RowWise | None = None,
    block: BlockOptions | None = None,
) -> TextLayer:
    """Layer `index`, with the tensors of the scope `w`.

    kind: which tokens the layer attends to; None for all. feed_forward: None for SwiGLU.
    """
    cache = sizes.cache(index, kind or Full())
    mixer = SelfAttention(w, sizes, index, cache, attention)
    if feed_forward is None:
        feed_forward = GatedFeedForward(w, hidden=sizes.hidden, size=sizes.feed_forward[index])
    return TextLayer(read_block(w, sizes, mixer, feed_forward, block), cache, rotary)


def parallel_layer(
    w: TensorScope,
    sizes: TextSizes,
    index: int,
    rotary: Rotary | None,
    *,
    kind: CacheKind | None = None,
    attention: AttentionOptions | None = None,
    feed_forward: RowWise | None = None,
    norm: str = "attn_norm",
    ffn_norm: str | None = None,
) -> TextLayer:
    """As `attention_layer`, with attention and feed-forward beside each other after a layer norm,
    or after one each; norm, ffn_norm: their names. Their biases are optional."""
    cache = sizes.cache(index, kind or Full())
    mixer = SelfAttention(w, sizes, index, cache, attention)
    if feed_forward is None:
        feed_forward = GatedFeedForward(w, hidden=sizes.hidden, size=sizes.feed_forward[index])
    layer_norm = partial(w.layer_norm, eps=sizes.eps, size=sizes.hidden)
    second = None if ffn_norm is None else layer_norm(ffn_norm)
    return TextLayer(ParallelBlock(layer_norm(norm), mixer, feed_forward, second), cache, rotary)
