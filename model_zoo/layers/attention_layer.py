"""The usual layers of text models: self-attention and a feed-forward, one after the other or beside
it."""

from collections.abc import Callable, Sequence

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import AttentionOptions, SelfAttention
from model_zoo.layers.block import BlockOptions, ParallelOptions, PostNormBlock, RowWise
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.norm import LayerNorm
from model_zoo.layers.rope import Rotary
from model_zoo.layers.stack import TextLayer
from model_zoo.layers.text_sizes import TextSizes
from runtime.kv.cache_kinds import CacheKind, Full

SEQUENTIAL = BlockOptions()
# Which tokens a layer attends to, and the rotation of its queries and keys, None for none.
Attended = tuple[CacheKind, Rotary | None]
# Makes a layer of its tensors, its number, and what it attends to.
MakeAlternatingLayer = Callable[[TensorScope, TextSizes, int, CacheKind, Rotary | None], TextLayer]


def attention_layer(
    w: TensorScope,
    sizes: TextSizes,
    index: int,
    rotary: Rotary | None,
    *,
    kind: CacheKind | None = None,
    attention: AttentionOptions | None = None,
    feed_forward: RowWise | None = None,
    block: BlockOptions | ParallelOptions = SEQUENTIAL,
) -> TextLayer:
    """Layer `index`, with the tensors of the scope `w`.

    kind: which tokens the layer attends to; None for all. feed_forward: None for SwiGLU.
    """
    cache = sizes.cache(index, kind or Full())
    mixer = SelfAttention(w, sizes, index, cache, attention)
    if feed_forward is None:
        feed_forward = GatedFeedForward(w, hidden=sizes.hidden, size=sizes.feed_forward[index])
    return TextLayer(block.read(w, sizes, mixer, feed_forward), cache, rotary)


def post_norm_layer(
    w: TensorScope,
    sizes: TextSizes,
    index: int,
    rotary: Rotary | None,
    feed_forward: RowWise,
    *,
    attention: AttentionOptions | None = None,
    attn_norm_2: LayerNorm | None = None,
) -> TextLayer:
    """A layer of an encoder, with layer norms after the residual sums; attn_norm_2: as in
    `PostNormBlock`."""
    cache = sizes.cache(index, Full())
    block = PostNormBlock(
        SelfAttention(w, sizes, index, cache, attention),
        w.layer_norm("attn_output_norm", sizes.eps, size=sizes.hidden),
        feed_forward,
        w.layer_norm("layer_output_norm", sizes.eps, size=sizes.hidden),
        attn_norm_2,
    )
    return TextLayer(block, cache, rotary)


def alternating_layers(
    w: TensorScope,
    sizes: TextSizes,
    slides: Sequence[bool],
    layer: MakeAlternatingLayer,
    *,
    near: Attended,
    far: Attended,
) -> list[TextLayer]:
    """All layers of a model: `near` where `slides` states a window, else `far`."""
    return [
        layer(w.scope("blk", i), sizes, i, *(near if close else far))
        for i, close in enumerate(slides)
    ]
