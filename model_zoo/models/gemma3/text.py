"""Gemma 3: the text model, and EmbeddingGemma, its layers with attention in both directions."""

from dataclasses import replace

from model_zoo.families import only_embeds
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import head_norms
from model_zoo.layers.attention_layer import alternating_layers, attention_layer
from model_zoo.layers.block import BlockOptions
from model_zoo.layers.decoder import Decoder, DecoderOptions, TextLayer
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import plain_frequencies, read_rotary
from model_zoo.layers.text_encoder import EncoderOptions, TextEncoder
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.pointwise import gelu_mul
from runtime.kv.cache_kinds import CacheKind, Full, Symmetric

# Values of all models, as in Gemma3TextConfig of `transformers`; the 27B has smaller heads.
DEFAULT_EPS, DEFAULT_HEAD_DIM, LARGEST_HEAD_DIM = 1e-6, 256, 128
FULL_EVERY = 6
LOCAL_BASE, GLOBAL_BASE = 10_000.0, 1_000_000.0
LARGEST = 62  # layers of the 27B model, whose scale is hidden / heads
# Layer counts of the models with linear scaling of global layers, which Ollama's files omit.
SCALED, SCALE = (34, 48, LARGEST), 8.0
# Two spellings: Ollama's, and llama.cpp's.
LOCAL_KEYS = "rope.local.freq_base", "rope.freq_base_swa"
GLOBAL_KEYS = "rope.global.freq_base", "rope.freq_base"
WINDOW = "attention.sliding_window"


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder | TextEncoder:
    """All layers but every sixth have a window and another rotary base.

    The norm weights in a file are those of the model plus one.
    """
    largest = metadata.get("block_count", int) == LARGEST
    head_dim = LARGEST_HEAD_DIM if largest else DEFAULT_HEAD_DIM
    sizes = TextSizes.read(metadata, eps=DEFAULT_EPS, head_dim=head_dim)
    return (_encoder if _encodes(w, metadata) else _decoder)(w, sizes)


def _encodes(w: TensorScope, metadata: Metadata) -> bool:
    """Ollama's files of EmbeddingGemma have Gemma 3's architecture. If they do not state that
    attention has both directions, matrices after pooling distinguish them, as for Ollama."""
    if only_embeds(metadata.architecture):
        return True
    return not metadata.get("attention.causal", bool, not w.has("dense.0"))


def _decoder(w: TensorScope, sizes: TextSizes) -> Decoder:
    """llama.cpp's converter omits the window if no layer has one."""
    options = DecoderOptions(embedding_scale=sizes.hidden**0.5, logit_softcap=_logit_cap(sizes))
    return Decoder(w, sizes, _layers(w, sizes, sizes.window()), options)


def _encoder(w: TensorScope, sizes: TextSizes) -> TextEncoder:
    """Files state both sides of the window together. Some of Ollama's name the last norm `norm`."""
    near = Symmetric(sizes.metadata.require_size(WINDOW) // 2)
    options = EncoderOptions(
        embedding_scale=sizes.hidden**0.5,
        output_norm=w.rms_norm("output_norm", sizes.eps, size=sizes.hidden, alt="norm"),
    )
    return TextEncoder(w, sizes, _layers(w, sizes, near), options)


def _layers(w: TensorScope, sizes: TextSizes, window: CacheKind) -> list[TextLayer]:
    """`window`: the kind of layers with a window; Full if there are none."""
    far = Full(), _global(w, sizes)
    near = far if window == Full() else (window, _local(w, sizes))
    slides = sizes.sliding_layers(FULL_EVERY)
    return alternating_layers(w, sizes, slides, _layer, near=near, far=far)


def _layer(
    w: TensorScope, sizes: TextSizes, index: int, kind: CacheKind, rotary: Rotary | None
) -> TextLayer:
    heads, size = sizes.heads[index], sizes.feed_forward[index]
    scaled_by = sizes.hidden // heads if sizes.layers == LARGEST else sizes.key_dim
    return attention_layer(
        w,
        sizes,
        index,
        rotary,
        kind=kind,
        attention=replace(head_norms(w, sizes), scale=scaled_by**-0.5),
        feed_forward=GatedFeedForward(w, hidden=sizes.hidden, size=size, gated=gelu_mul),
        block=BlockOptions(post_norms=True),
    )


def _local(w: TensorScope, sizes: TextSizes) -> Rotary:
    base = _base(sizes.metadata, LOCAL_KEYS, LOCAL_BASE)
    return Rotary(plain_frequencies(sizes.key_dim, base).to(w.device), Pairs.NEOX)


def _global(w: TensorScope, sizes: TextSizes) -> Rotary:
    metadata = sizes.metadata
    rotary = read_rotary(
        w,
        sizes,
        Pairs.NEOX,
        dim=sizes.key_dim,
        base=_base(metadata, GLOBAL_KEYS, GLOBAL_BASE),
    )
    window = metadata.get(WINDOW, int, 0)
    silent = not metadata.has("rope.scaling.type") and not metadata.has("rope.scaling.factor")
    if silent and sizes.layers in SCALED and 0 < window < sizes.context_length:
        return replace(rotary, frequencies=rotary.frequencies / SCALE)
    return rotary


def _base(metadata: Metadata, keys: tuple[str, str], default: float) -> float:
    ollama, llama_cpp = keys
    return metadata.get_positive(ollama if metadata.has(ollama) else llama_cpp, default)


def _logit_cap(sizes: TextSizes) -> float | None:
    """No model has a cap; the one stated in Ollama's files of the 1B model is ignored."""
    ollama = any(sizes.metadata.has(keys[0]) for keys in (LOCAL_KEYS, GLOBAL_KEYS))
    return None if ollama else sizes.cap("final_logit_softcapping")
