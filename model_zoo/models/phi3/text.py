"""Phi 3, 3.5 and 4."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import DEFAULT_BASE, read_rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.kv.cache_kinds import CacheKind

# The window of Phi-3-mini-4k and Phi-3-medium-4k, by number of layers and context length.
# llama.cpp's first converters omitted the key; its loader had the same default for these models.
WINDOW, WINDOWED_LAYERS, WINDOWED_CONTEXT = 2047, (32, 40), 4096


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Queries, keys and values are one tensor, gate and up another; either all layers have a window
    or none has."""
    sizes = TextSizes.read(metadata)
    rotary = read_rotary(w, sizes, Pairs.NEOX, default_base=DEFAULT_BASE, kind=_scaling(sizes))
    kind = sizes.window(_usual_window(sizes))
    layers = [_layer(w.scope("blk", i), sizes, i, kind, rotary) for i in range(sizes.layers)]
    return Decoder(w, sizes, layers)


def _scaling(sizes: TextSizes) -> str | None:
    """The kind of scaling of files without the key. All state the original context, but only those
    with factors for positions beyond it the factor of attention."""
    metadata, longest = sizes.metadata, sizes.context_length
    original = metadata.get("rope.scaling.original_context_length", int, longest)
    stated = metadata.has("rope.scaling.attn_factor")
    return "longrope" if stated and original < longest else None


def _usual_window(sizes: TextSizes) -> int:
    """The window of files without the key; 0 for none, as in models with longer contexts."""
    windowed = sizes.layers in WINDOWED_LAYERS and sizes.context_length == WINDOWED_CONTEXT
    return WINDOW if windowed else 0


def _layer(
    w: TensorScope, sizes: TextSizes, index: int, kind: CacheKind, rotary: Rotary
) -> TextLayer:
    size = sizes.feed_forward[index]
    feed_forward = GatedFeedForward(w, hidden=sizes.hidden, size=size, whole="ffn_up")
    return attention_layer(w, sizes, index, rotary, kind=kind, feed_forward=feed_forward)
