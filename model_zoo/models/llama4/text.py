"""Llama 4, the text model."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import SelfAttention, Temperature
from model_zoo.layers.block import RowWise, read_block
from model_zoo.layers.decoder import Decoder, Layer
from model_zoo.layers.experts import Experts, ExpertSizes, sigmoid_of_chosen
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.sizes import Sizes
from runtime.kv.spec import Chunked, Full

# The values of both models, as in Llama4TextConfig of `transformers`.
DEFAULT_CHUNK, DEFAULT_BASE = 8192, 500_000.0
FULL_EVERY = 4
LARGEST = 128  # experts of the model that has no norms of queries and keys


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Most layers see their chunk of the positions; the others see all and do not turn.

    Rotary pairs are interleaved, as in the checkpoints. Vision tensors are left to others.
    """
    sizes = Sizes.read(metadata, head_dim=metadata.get("attention.head_dim", int))
    base = metadata.get_positive("rope.freq_base", DEFAULT_BASE)
    rotary = read_rotary(w, metadata, pairs=Pairs.INTERLEAVED, key_dim=sizes.key_dim, base=base)
    turning = _turning_layers(sizes)
    layers = [
        _layer(w.scope("blk", i), sizes, i, rotary if turning[i] else None)
        for i in range(sizes.layers)
    ]
    return Decoder(w, sizes, layers)


def _layer(w: TensorScope, sizes: Sizes, index: int, rotary: Rotary | None) -> Layer:
    cache = sizes.cache(index, Full() if rotary is None else _kind(sizes))
    attention = SelfAttention(
        w,
        hidden=sizes.hidden,
        heads=sizes.heads[index],
        cache=cache,
        scale=sizes.key_dim**-0.5,
        turned_norm=None if rotary is None else _turned_norm(sizes),
        temperature=_temperature(sizes) if rotary is None else None,
    )
    return Layer(read_block(w, sizes, attention, _feed_forward(w, sizes, index)), cache, rotary)


def _feed_forward(w: TensorScope, sizes: Sizes, index: int) -> RowWise:
    step, hidden = sizes.metadata.get_size("interleave_moe_layer_step", 1), sizes.hidden
    if (index + 1) % step:
        return GatedFeedForward(w, hidden=hidden, size=sizes.feed_forward[index])
    shared = GatedFeedForward(
        w,
        hidden=hidden,
        size=sizes.metadata.require_size("expert_feed_forward_length"),
        gate="ffn_gate_shexp",
        up="ffn_up_shexp",
        down="ffn_down_shexp",
    )
    return Experts(
        w,
        hidden=hidden,
        sizes=ExpertSizes.read(sizes.metadata),
        routing=sigmoid_of_chosen,
        weigh_input=True,
        shared=shared,
    )


def _turning_layers(sizes: Sizes) -> tuple[bool, ...]:
    if _unchunked(sizes):
        return (True,) * sizes.layers
    interval = sizes.metadata.get_size("no_rope_interval", FULL_EVERY)
    return tuple((index + 1) % interval > 0 for index in range(sizes.layers))


def _kind(sizes: Sizes) -> Chunked | Full:
    if _unchunked(sizes):
        return Full()
    return Chunked(sizes.metadata.get_size("attention.chunk_size", DEFAULT_CHUNK))


def _unchunked(sizes: Sizes) -> bool:
    """Files of llama.cpp say so by a window of nought."""
    return sizes.metadata.get("attention.sliding_window", int) == 0


def _turned_norm(sizes: Sizes) -> RMSNorm | None:
    usual = sizes.metadata.get("expert_count", int) != LARGEST
    return RMSNorm(None, sizes.eps) if sizes.metadata.get("use_qk_norm", bool, usual) else None


def _temperature(sizes: Sizes) -> Temperature | None:
    metadata = sizes.metadata
    if not metadata.get("attention.temperature_tuning", bool, True):
        return None
    return Temperature(
        metadata.get_positive("attention.scale", 0.1),
        metadata.get_positive("attention.floor_scale", 8192.0),
        offset=1,
    )
