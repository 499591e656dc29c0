"""Mellum 2: Qwen 3 with experts, and a window in most layers."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import head_norms
from model_zoo.layers.attention_layer import alternating_layers, attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.experts import ExpertOptions, Experts
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import plain_frequencies, read_rotary
from model_zoo.layers.routing import stated_softmax
from model_zoo.layers.text_sizes import TextSizes
from runtime.kv.cache_kinds import CacheKind, Full

FULL_EVERY = 4  # as in llama.cpp
NEAR_BASE = "rope.freq_base_swa"


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Layers with a window have their own base of rotation, and no rope scaling."""
    sizes = TextSizes.read(metadata)
    far, window = (Full(), read_rotary(w, sizes, Pairs.NEOX)), sizes.window()
    near = far if window == Full() else (window, _near(w, sizes))
    slides = sizes.sliding_layers(FULL_EVERY)
    return Decoder(w, sizes, alternating_layers(w, sizes, slides, _layer, near=near, far=far))


def _near(w: TensorScope, sizes: TextSizes) -> Rotary:
    metadata = sizes.metadata
    base = metadata.get_positive(NEAR_BASE, metadata.get_positive("rope.freq_base"))
    return Rotary(plain_frequencies(sizes.key_dim, base).to(w.device), Pairs.NEOX)


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
        feed_forward=Experts.read(w, sizes, ExpertOptions(routing=stated_softmax(sizes.metadata))),
    )
