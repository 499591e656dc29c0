"""Llama-Nemotron 51B, Super and Ultra, and DeciLM: Llama whose layers have different numbers of key
heads and widths, some of them a matrix instead of attention, no attention, or no feed-forward."""

from collections.abc import Sequence

from torch import Tensor

from model_zoo.gguf.metadata import MAX_LAYERS, Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import SelfAttention
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.block import MixerBlock, RowWise, RowWiseBlock
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import DEFAULT_BASE, read_rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.activations import Activations
from runtime.kv.cache_kinds import Full

_HEADS, _KV_HEADS = "attention.head_count", "attention.head_count_kv"


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Rotary pairs are interleaved: converters have permuted the rows of attn_q and attn_k.

    A layer without heads has no attention; one with heads, but no key heads, has a matrix instead.
    Attention of layers without a feed-forward is computed, as in the authors' code; llama.cpp
    leaves such layers out.
    """
    count = metadata.require_size("block_count", at_most=MAX_LAYERS)
    heads = metadata.require_per_layer(_HEADS, count, at_least=0)
    kv_heads = metadata.get_per_layer(_KV_HEADS, count, heads, at_least=0)
    sizes = _sizes(metadata, heads, kv_heads)
    rotary = read_rotary(w, sizes, Pairs.INTERLEAVED, default_base=DEFAULT_BASE)
    layers = [
        _attending_layer(w.scope("blk", i), sizes, i, rotary)
        if kv_heads[i]
        else _row_wise_layer(w.scope("blk", i), sizes, i, projects=heads[i] > 0)
        for i in range(count)
    ]
    return Decoder(w, sizes, layers)


def _sizes(metadata: Metadata, heads: Sequence[int], kv_heads: Sequence[int]) -> TextSizes:
    """Sizes in which layers without attention have the heads of others, and one key head."""
    if not any(kv_heads):
        raise metadata.error(_KV_HEADS, "counts key heads for no layer")
    if any(shared and not own for own, shared in zip(heads, kv_heads, strict=True)):
        raise metadata.error(_KV_HEADS, "counts key heads for a layer without heads")
    return TextSizes.read(
        metadata,
        heads=tuple(own or max(heads) for own in heads),
        kv_heads=tuple(shared or 1 for shared in kv_heads),
    )


def _attending_layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    w.ignore("attn_rot_embd")  # rotary frequencies that old converters stored
    feed_forward = _feed_forward(w, sizes, index)
    if feed_forward is not None:
        return attention_layer(w, sizes, index, rotary, feed_forward=feed_forward)
    cache = sizes.cache(index, Full())
    attention = SelfAttention(w, sizes, index, cache)
    return TextLayer(MixerBlock(_norm(w, sizes, "attn_norm"), attention), cache, rotary)


def _row_wise_layer(w: TensorScope, sizes: TextSizes, index: int, *, projects: bool) -> TextLayer:
    """projects: whether it has a matrix instead of attention."""
    feed_forward = _feed_forward(w, sizes, index)
    parts: list[tuple[RMSNorm, RowWise]] = []
    if projects:
        parts.append((_norm(w, sizes, "attn_norm"), _Projection(w, sizes.hidden)))
    if feed_forward is not None:
        parts.append((_norm(w, sizes, "ffn_norm"), feed_forward))
    return TextLayer(RowWiseBlock(tuple(parts)), None)


def _norm(w: TensorScope, sizes: TextSizes, name: str) -> RMSNorm:
    return w.rms_norm(name, sizes.eps, size=sizes.hidden)


def _feed_forward(w: TensorScope, sizes: TextSizes, index: int) -> GatedFeedForward | None:
    width = sizes.optional_feed_forward[index]
    return GatedFeedForward(w, hidden=sizes.hidden, size=width) if width else None


class _Projection:
    """A matrix instead of attention. Ranks divide its outputs."""

    def __init__(self, w: TensorScope, hidden: int) -> None:
        self._linear = w.gathered_linear("attn_output", shape=(hidden, hidden))
        self.row_elements = 2 * hidden + self._linear.row_elements
        self.matrix_elements = hidden * hidden
        self.rounding = self._linear.rounding

    def __call__(self, x: Activations) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        return self._linear(x)
