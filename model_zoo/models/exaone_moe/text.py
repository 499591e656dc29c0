"""K-EXAONE: attention of EXAONE 4 with norms before each part, and experts of DeepSeek V3."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import head_norms
from model_zoo.layers.attention_layer import alternating_layers, attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.draft_layers import without_draft_layers
from model_zoo.layers.leading_dense import SIGMOID, leading_dense_or_experts
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.kv.cache_kinds import CacheKind, Full, Sliding

FULL_EVERY = 4  # as in llama.cpp


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Layers with a window are rotated, those that attend to all tokens are not."""
    sizes = without_draft_layers(w, TextSizes.read(metadata))
    rotary = read_rotary(w, sizes, Pairs.NEOX)
    window = Sliding(metadata.require_size("attention.sliding_window"))
    slides, near, far = sizes.sliding_layers(FULL_EVERY), (window, rotary), (Full(), None)
    layers = alternating_layers(w, sizes, slides, _layer, near=near, far=far)
    return Decoder(w, sizes, layers)


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
        feed_forward=leading_dense_or_experts(w, sizes, index, scores=SIGMOID),
    )
