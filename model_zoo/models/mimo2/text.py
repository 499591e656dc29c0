"""MiMo-V2: layers with a window have attention sinks; values are scaled; experts without a shared
one."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import AttentionOptions, read_sinks
from model_zoo.layers.attention_layer import alternating_layers, attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.draft_layers import without_draft_layers
from model_zoo.layers.leading_dense import SIGMOID, stated_experts
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.kv.cache_kinds import CacheKind, Full, Sliding

NEAR_BASE = "rope.freq_base_swa"
VALUE_SCALE = "attention.value_scale"
DEFAULT_NEAR_BASE = 10_000.0  # as in llama.cpp
# Of the published models; llama.cpp's first files of MiMo-V2-Flash do not state it.
DEFAULT_VALUE_SCALE = 0.707
# The setting of the published models. In the implementation that their authors refer to, SGLang's,
# a token sees as many before itself; llama.cpp's converter copies the setting.
PUBLISHED_WINDOW = 128


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """The file lists the layers with a window, and the key heads of each layer."""
    sizes = without_draft_layers(w, TextSizes.read(metadata))
    near_base = metadata.get_positive(NEAR_BASE, DEFAULT_NEAR_BASE)
    stated = metadata.require_size("attention.sliding_window")
    window = Sliding(stated + (stated == PUBLISHED_WINDOW))
    near = window, read_rotary(w, sizes, Pairs.NEOX, base=near_base)
    far = Full(), read_rotary(w, sizes, Pairs.NEOX)
    metadata.require_array("attention.sliding_window_pattern", bool)
    slides = sizes.sliding_layers(0)
    return Decoder(w, sizes, alternating_layers(w, sizes, slides, _layer, near=near, far=far))


def _layer(
    w: TensorScope, sizes: TextSizes, index: int, kind: CacheKind, rotary: Rotary | None
) -> TextLayer:
    """Layers without a router are dense."""
    metadata = sizes.metadata
    experts = None
    if w.has("ffn_gate_inp"):
        experts = stated_experts(w, sizes, scores=SIGMOID, renormalised=True)
    options = AttentionOptions(
        sinks=read_sinks(w, sizes.heads[index]) if w.has("attn_sinks") else None,
        output_scale=metadata.get_positive(VALUE_SCALE, DEFAULT_VALUE_SCALE),
    )
    return attention_layer(
        w, sizes, index, rotary, kind=kind, attention=options, feed_forward=experts
    )
