"""How ranks divide a layer: attention by heads, feed-forwards by inner columns."""

from dataclasses import replace

from model_zoo.gguf.scope import TensorScope
from runtime.distributed.ranks import HeadSplit, Ranks, Split, by_blocks, evenly, split_heads
from runtime.errors import ConfigurationError
from runtime.kv.cache_layout import LayerCache
from runtime.kv.states import StateCache


def divided_heads(w: TensorScope, heads: int, kv_heads: int, *, query: str = "attn_q") -> HeadSplit:
    """How ranks divide the heads of the queries in `query` and the key heads that they use."""
    if w.ranks.size > heads:
        raise _too_many(w, query, f"{heads:,} heads", heads)
    return split_heads(heads, kv_heads, w.ranks)


def divided_width(w: TensorScope, width: int, down: str) -> Split:
    """How ranks divide the inner columns of a feed-forward: at block boundaries if possible."""
    if 0 < width < w.ranks.size:
        raise _too_many(w, down, f"{width:,} inputs", width)
    return by_blocks(width, w.block_elements(down), w.ranks)


def local_cache(cache: LayerCache, ranks: Ranks) -> LayerCache:
    """The part of a layer's cache that this rank stores.

    Every rank computes recurrent layers in full and stores their whole state.
    """
    if ranks.size == 1 or isinstance(cache, StateCache):
        return cache
    heads = cache.kv_heads
    held = evenly(heads, ranks).count if ranks.size <= heads else 1
    return replace(cache, kv_heads=held, divided_heads=heads)


def _too_many(w: TensorScope, name: str, what: str, most: int) -> ConfigurationError:
    return ConfigurationError(
        f"{w.described(name)} has {what}, which cannot be divided among {w.ranks.size} ranks; "
        f"`parallel.tensor` may be 1 to {most:,}."
    )
