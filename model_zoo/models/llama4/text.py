"""Llama 4: the text model."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import AttentionOptions
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.block import RowWise
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.experts import ExpertOptions, Experts
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.routing import SIGMOID_OF_CHOSEN
from model_zoo.layers.temperature import Temperature
from model_zoo.layers.text_sizes import TextSizes
from runtime.kv.cache_kinds import Chunked, Full

# Values of both models, as in Llama4TextConfig of `transformers`.
DEFAULT_CHUNK, DEFAULT_BASE = 8192, 500_000.0
FULL_EVERY = 4
LARGEST = 128  # experts of the model without norms of queries and keys


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Most layers attend within chunks of positions; the others attend to all and have no rotation.

    Rotary pairs are interleaved, as in the checkpoints.
    """
    sizes = TextSizes.read(metadata, head_dim=metadata.get("attention.head_dim", int))
    rotary = read_rotary(w, sizes, Pairs.INTERLEAVED, default_base=DEFAULT_BASE)
    rotated = _rotated_layers(sizes)
    layers = [
        _layer(w.scope("blk", i), sizes, i, rotary if rotated[i] else None)
        for i in range(sizes.layers)
    ]
    return Decoder(w, sizes, layers)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary | None) -> TextLayer:
    if rotary is None:
        attention = AttentionOptions(temperature=_temperature(sizes))
    else:
        norm = _rotated_norm(sizes)
        attention = AttentionOptions(rotated_q_norm=norm, rotated_k_norm=norm)
    return attention_layer(
        w,
        sizes,
        index,
        rotary,
        kind=None if rotary is None else _kind(sizes),
        attention=attention,
        feed_forward=_feed_forward(w, sizes, index),
    )


def _feed_forward(w: TensorScope, sizes: TextSizes, index: int) -> RowWise:
    """SwiGLU, or in every so many layers experts; in none of them if the file states 0, as those
    of MobileLLM-R1."""
    key, hidden = "interleave_moe_layer_step", sizes.hidden
    dense = sizes.metadata.get(key, int, 1) == 0
    if dense or (index + 1) % sizes.metadata.get_size(key, 1):
        return GatedFeedForward(w, hidden=hidden, size=sizes.feed_forward[index])
    size = sizes.metadata.require_size("expert_feed_forward_length")
    options = ExpertOptions(
        routing=SIGMOID_OF_CHOSEN,
        weigh_input=True,
        shared=GatedFeedForward(w, hidden=hidden, size=size, suffix="_shexp"),
    )
    return Experts.read(w, sizes, options)


def _rotated_layers(sizes: TextSizes) -> tuple[bool, ...]:
    if _unchunked(sizes):
        return (True,) * sizes.layers
    interval = sizes.metadata.get_size("no_rope_interval", FULL_EVERY)
    return tuple((index + 1) % interval > 0 for index in range(sizes.layers))


def _kind(sizes: TextSizes) -> Chunked | Full:
    if _unchunked(sizes):
        return Full()
    return Chunked(sizes.metadata.get_size("attention.chunk_size", DEFAULT_CHUNK))


def _unchunked(sizes: TextSizes) -> bool:
    """Files of llama.cpp state a window of 0 for models without chunks, such as MobileLLM-R1."""
    return sizes.metadata.get("attention.sliding_window", int) == 0


def _rotated_norm(sizes: TextSizes) -> RMSNorm | None:
    usual = sizes.metadata.get("expert_count", int) != LARGEST
    return RMSNorm(None, sizes.eps) if sizes.metadata.get("use_qk_norm", bool, usual) else None


def _temperature(sizes: TextSizes) -> Temperature | None:
    metadata = sizes.metadata
    if not metadata.get("attention.temperature_tuning", bool, True):
        return None
    return Temperature(
        metadata.get_positive("attention.scale", 0.1),
        metadata.get_positive("attention.floor_scale", 8192.0),
        offset=1,
    )
