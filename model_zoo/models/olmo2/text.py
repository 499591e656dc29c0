"""OLMo 2 and 3: norms follow attention and feed-forward; queries and keys are normed across all
heads."""

from dataclasses import replace
from math import isclose

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import norms_across_heads
from model_zoo.layers.attention_layer import alternating_layers, attention_layer
from model_zoo.layers.block import BlockOptions
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import log_scale, plain_frequencies, read_rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.kv.cache_kinds import CacheKind, Full

WINDOW = "attention.sliding_window"
MAGNITUDE, NEWER_MAGNITUDE = "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"
FULL_EVERY = 4  # in OLMo 3, as in llama.cpp


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Files that state a window are of OLMo 3; YaRN does not apply to its layers with a window."""
    sizes = TextSizes.read(metadata)
    slides, window, far = sizes.sliding_layers(FULL_EVERY), sizes.window(), (Full(), _far(w, sizes))
    near = far if window == Full() else (window, _near(w, sizes))
    return Decoder(w, sizes, alternating_layers(w, sizes, slides, _layer, near=near, far=far))


def _near(w: TensorScope, sizes: TextSizes) -> Rotary:
    metadata = sizes.metadata
    base = metadata.get_positive("rope.freq_base_swa", metadata.get_positive("rope.freq_base"))
    return Rotary(plain_frequencies(sizes.key_dim, base).to(w.device), Pairs.NEOX)


def _far(w: TensorScope, sizes: TextSizes) -> Rotary:
    metadata = sizes.metadata
    rotary = read_rotary(w, sizes, Pairs.NEOX)
    if metadata.has(MAGNITUDE) and _is_whole_magnitude(metadata):
        return replace(rotary, magnitude=metadata.get_positive(MAGNITUDE))
    return rotary


def _is_whole_magnitude(metadata: Metadata) -> bool:
    """Whether MAGNITUDE is the magnitude itself, not a factor of YaRN's default: in files of
    Ollama, and in llama.cpp's first files of OLMo 3, whose magnitude is YaRN's default."""
    if metadata.architecture == "olmo3":
        return True
    scaled = metadata.get("rope.scaling.type", str) == "yarn"
    if not scaled or metadata.has(NEWER_MAGNITUDE) or not metadata.get(WINDOW, int, 0):
        return False
    usual = log_scale(metadata.get_positive("rope.scaling.factor"), 1.0)
    return isclose(metadata.require(MAGNITUDE, float), usual, abs_tol=1e-3)


def _layer(
    w: TensorScope, sizes: TextSizes, index: int, kind: CacheKind, rotary: Rotary | None
) -> TextLayer:
    return attention_layer(
        w,
        sizes,
        index,
        rotary,
        kind=kind,
        attention=norms_across_heads(w, sizes, index),
        block=BlockOptions(pre_norms=False, post_norms=True),
    )
