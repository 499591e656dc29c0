"""EXAONE 4: norms follow attention and feed-forward; queries and keys of each head are normed."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import head_norms
from model_zoo.layers.attention_layer import alternating_layers, attention_layer
from model_zoo.layers.block import BlockOptions
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.draft_layers import without_draft_layers
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.kv.cache_kinds import CacheKind, Full

FULL_EVERY = 4  # in the 32B, as in llama.cpp


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Models that state a window have layers with a window and layers that attend to all tokens,
    without rotation. In the others, all layers attend to all tokens, with rotation."""
    sizes = without_draft_layers(w, TextSizes.read(metadata))
    rotary = read_rotary(w, sizes, Pairs.NEOX)
    window, slides = sizes.window(), sizes.sliding_layers(FULL_EVERY)
    near, far = (window, rotary), (Full(), rotary if window == Full() else None)
    return Decoder(w, sizes, alternating_layers(w, sizes, slides, _layer, near=near, far=far))


def _layer(
    w: TensorScope, sizes: TextSizes, index: int, kind: CacheKind, rotary: Rotary | None
) -> TextLayer:
    return attention_layer(
        w,
        sizes,
        index,
        rotary,
        kind=kind,
        attention=head_norms(w, sizes),
        block=BlockOptions(pre_norms=False, post_norms=True),
    )
