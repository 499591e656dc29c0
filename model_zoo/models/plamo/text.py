"""PLaMo 1 to 3: a feed-forward beside attention; recurrent layers and attention with norms after
them; windows in most layers."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import head_norms, norms_of_each_head
from model_zoo.layers.attention_layer import alternating_layers, attention_layer
from model_zoo.layers.block import BlockOptions, ParallelOptions
from model_zoo.layers.decoder import Decoder, TextLayer, uniform_decoder
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.hybrid import read_sizes, recurrent_layers
from model_zoo.layers.mamba_heads import MambaHeads
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import plain_frequencies, read_rotary
from model_zoo.layers.state_sizes import MAX_HEADS, MAX_TAPS, StateSizes
from model_zoo.layers.text_sizes import MAX_HEAD_DIM, TextSizes
from runtime.kv.cache_kinds import CacheKind, Full

BASE = 10000.0  # files of PLaMo 1 state none
HEAD_EPS = 1e-6  # of the norms of queries and keys in PLaMo 2; files do not state it
FULL_EVERY = 8  # in PLaMo 3, as in llama.cpp
# The hidden size over the size of the vectors from which steps are projected, at least 64.
PER_RANK, LEAST_RANK = 16, 64
NORMED = BlockOptions(post_norms=True)


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    match metadata.architecture:
        case "plamo2":
            return _hybrid(w, metadata)
        case "plamo3":
            return _with_windows(w, metadata)
    sizes = TextSizes.read(metadata)
    return uniform_decoder(w, sizes, Pairs.NEOX, _parallel_layer, default_base=BASE)


def _parallel_layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    return attention_layer(w, sizes, index, rotary, block=ParallelOptions(rms=True))


def _hybrid(w: TensorScope, metadata: Metadata) -> Decoder:
    """Layers without key heads are recurrent. llama.cpp's files state no window, and it computes
    without one."""
    sizes = read_sizes(w, metadata)
    rotary, window = read_rotary(w, sizes, Pairs.NEOX), sizes.window()
    layers = []
    for index, recurs in enumerate(recurrent_layers(sizes)):
        scope = w.scope("blk", index)
        if recurs:
            layers.append(_recurrent_layer(scope, sizes, index))
        else:
            layers.append(_attending_layer(scope, sizes, index, window, rotary))
    return Decoder(w, sizes, layers)


def _recurrent_layer(w: TensorScope, sizes: TextSizes, index: int) -> TextLayer:
    mixer = MambaHeads(
        w,
        hidden=sizes.hidden,
        sizes=_state_sizes(sizes.metadata),
        rank=max(LEAST_RANK, sizes.hidden // PER_RANK),
        eps=sizes.eps,
    )
    return TextLayer(NORMED.read(w, sizes, mixer, _feed_forward(w, sizes, index)), mixer.cache)


def _state_sizes(metadata: Metadata) -> StateSizes:
    """Files state no groups of heads, because all heads share keys and queries."""
    heads = metadata.require_size("ssm.time_step_rank", at_most=MAX_HEADS)
    inner = metadata.require_size("ssm.inner_size", at_most=MAX_HEADS * MAX_HEAD_DIM)
    if inner % heads:
        raise metadata.error("ssm.time_step_rank", f"is {heads:,}; it must divide {inner:,}")
    return StateSizes(
        heads,
        1,
        metadata.require_size("ssm.state_size", at_most=MAX_HEAD_DIM),
        inner // heads,
        metadata.require_size("ssm.conv_kernel", at_most=MAX_TAPS),
    )


def _attending_layer(
    w: TensorScope, sizes: TextSizes, index: int, kind: CacheKind, rotary: Rotary | None
) -> TextLayer:
    """A layer of PLaMo 2, or of PLaMo 3, whose heads share the weights of their norms."""
    shared = sizes.metadata.architecture == "plamo3"
    norms = head_norms(w, sizes) if shared else norms_of_each_head(w, sizes, index, eps=HEAD_EPS)
    return attention_layer(
        w,
        sizes,
        index,
        rotary,
        kind=kind,
        attention=norms,
        feed_forward=_feed_forward(w, sizes, index),
        block=NORMED,
    )


def _with_windows(w: TensorScope, metadata: Metadata) -> Decoder:
    """Layers with a window have a rotary embedding of their own."""
    sizes = TextSizes.read(metadata)
    base = metadata.get_positive("rope.freq_base_swa", metadata.get_positive("rope.freq_base"))
    near = Rotary(plain_frequencies(sizes.key_dim, base).to(w.device), Pairs.NEOX)
    far, window = (Full(), read_rotary(w, sizes, Pairs.NEOX)), sizes.window()
    layers = alternating_layers(
        w,
        sizes,
        sizes.sliding_layers(FULL_EVERY),
        _attending_layer,
        near=far if window == Full() else (window, near),
        far=far,
    )
    return Decoder(w, sizes, layers)


def _feed_forward(w: TensorScope, sizes: TextSizes, index: int) -> GatedFeedForward:
    return GatedFeedForward(w, hidden=sizes.hidden, size=sizes.feed_forward[index], whole="ffn_up")
