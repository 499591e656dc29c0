"""How ranks divide what a layer has: by heads, and by the columns inside a feed-forward."""

from dataclasses import replace

from model_zoo.gguf.scope import TensorScope
from runtime.distributed.ranks import HeadSplit, Ranks, Split, by_blocks, evenly, split_heads
from runtime.errors import ConfigurationError
from runtime.kv.spec import LayerCache
from runtime.kv.states import StateCache


def divided_heads(
    w: TensorScope, heads: int, cache: LayerCache, *, query: str = "attn_q"
) -> HeadSplit:
    """Of the queries in `query` and the keys that go with them; `cache` is that of all ranks."""
    if w.ranks.size > heads:
        raise _too_many(w, query, f"{heads:,} heads", heads)
    return split_heads(heads, cache.kv_heads, w.ranks)


def divided_width(w: TensorScope, width: int, down: str) -> Split:
    """Of the columns inside a feed-forward, where possible at bounds of the blocks of `down`."""
    if 0 < width < w.ranks.size:
        raise _too_many(w, down, f"{width:,} inputs", width)
    return by_blocks(width, w.block_elements(down), w.ranks)


def local_cache(cache: LayerCache, ranks: Ranks) -> LayerCache:
    """What this rank stores of a layer.

    Layers with a recurrence are computed by every rank, each with all states.
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
