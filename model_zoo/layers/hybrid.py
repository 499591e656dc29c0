"""Metadata of models that mix recurrent layers with attention."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.draft_layers import without_draft_layers
from model_zoo.layers.text_sizes import TextSizes

_HEADS, _KV_HEADS = "attention.head_count", "attention.head_count_kv"
_INTERVAL = "full_attention_interval"
_RECURRENT = "attention.recurrent_layers"


def read_sizes(w: TensorScope, metadata: Metadata, *, head_dim: int | None = None) -> TextSizes:
    """The sizes without draft layers, whose tensors are not loaded; heads as `key_heads`.
    head_dim: as of `TextSizes.read`."""
    sizes = TextSizes.read(
        metadata,
        head_dim=head_dim,
        heads=_without_zeros(metadata, _HEADS),
        kv_heads=key_heads(metadata),
    )
    return without_draft_layers(w, sizes)


def recurrent_layers(sizes: TextSizes, *, full_every: int = 1) -> tuple[bool, ...]:
    """For each layer, whether it is recurrent: as listed, or the layers without key heads, or all
    except every n-th. full_every: n for files that state none of it."""
    metadata, key = sizes.metadata, _KV_HEADS
    stated = without_key_heads(metadata)
    if metadata.has(_RECURRENT):
        key, stated = _RECURRENT, metadata.require_array(_RECURRENT, bool)
    elif stated is None:
        interval = metadata.get_size(_INTERVAL, full_every)
        stated = tuple((layer + 1) % interval > 0 for layer in range(sizes.layers))
    if len(stated) < sizes.layers:
        raise metadata.error(key, f"has {len(stated):,} entries")
    return stated[: sizes.layers]


def without_key_heads(metadata: Metadata) -> tuple[bool, ...] | None:
    """For each layer, whether the file states 0 key heads; None if it states one number for all."""
    if metadata.length(_KV_HEADS) is None:
        return None
    return tuple(count == 0 for count in metadata.require_array(_KV_HEADS, int))


def key_heads(metadata: Metadata) -> tuple[int, ...] | None:
    """Key heads by layer; None if the file states one number for all. Layers for which it states 0
    get the number of the others."""
    return _without_zeros(metadata, _KV_HEADS)


def _without_zeros(metadata: Metadata, key: str) -> tuple[int, ...] | None:
    """Numbers of heads by layer, as `key_heads`."""
    if metadata.length(key) is None:
        return None
    stated = metadata.require_array(key, int)
    if any(count < 0 for count in stated) or not any(stated):
        raise metadata.error(key, "counts heads for no layer, or fewer than none")
    return tuple(count or max(stated) for count in stated)
