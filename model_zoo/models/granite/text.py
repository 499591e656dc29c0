"""Granite 3 and 4, dense and with experts: Llama with multipliers of embeddings, residuals and
logits; in Granite 4.0 H, most layers are Mamba 2; in Granite Swash, most have a window."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import AttentionOptions, read_sinks
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.block import BlockOptions, RowWise
from model_zoo.layers.decoder import Decoder, DecoderOptions, TextLayer
from model_zoo.layers.experts import ExpertOptions, experts_or_dense
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.hybrid import read_sizes, recurrent_layers
from model_zoo.layers.mamba2 import Mamba2
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.state_sizes import StateSizes
from model_zoo.layers.text_sizes import TextSizes
from runtime.kv.cache_kinds import CacheKind, Full, Sliding

HYBRID = "granitehybrid"  # the architecture of Granite 4.0 H
WINDOWED = "granite_swa"  # of Granite Swash, whose heads have attention sinks


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Rotary pairs are interleaved: converters have permuted the rows of attn_q and attn_k.

    Multipliers are 1 by default, as in GraniteConfig of `transformers`.
    """
    hybrid = metadata.architecture == HYBRID
    sizes = read_sizes(w, metadata) if hybrid else TextSizes.read(metadata)
    states = StateSizes.read(metadata) if hybrid else None
    recurrent = recurrent_layers(sizes) if hybrid else (False,) * sizes.layers
    rotary = _rotary(w, sizes)
    rotated, kinds = _rotated_layers(sizes), _kinds(sizes)
    layers = []
    for index in range(sizes.layers):
        scope = w.scope("blk", index)
        if states is not None and recurrent[index]:
            layers.append(_recurrent_layer(scope, sizes, states, index))
        else:
            turned = rotary if rotated[index] else None
            layers.append(_attending_layer(scope, sizes, index, turned, kinds[index]))
    options = DecoderOptions(
        embedding_scale=metadata.get_positive("embedding_scale", 1.0),
        images_as_tokens=True,
        logit_scale=1 / metadata.get_positive("logit_scale", 1.0),
    )
    return Decoder(w, sizes, layers, options)


def _rotary(w: TensorScope, sizes: TextSizes) -> Rotary | None:
    """None if the file states that positions are not encoded, as in Granite 4.0 H; this key has
    another meaning elsewhere."""
    metadata = sizes.metadata
    if not metadata.get("rope.scaling.finetuned", bool, True):
        return None
    return read_rotary(w, sizes, Pairs.INTERLEAVED)


def _rotated_layers(sizes: TextSizes) -> tuple[bool, ...]:
    """Whether each layer is rotated, as the file lists, else all of them."""
    key, metadata = "attention.rope_pattern", sizes.metadata
    if not metadata.has(key):
        return (True,) * sizes.layers
    flags = metadata.require_array(key, bool)
    if len(flags) != sizes.layers:
        raise metadata.error(key, f"has {len(flags):,} entries for {sizes.layers:,} layers")
    return flags


def _kinds(sizes: TextSizes) -> list[CacheKind]:
    """The kind of each layer; files list those with a window."""
    metadata = sizes.metadata
    if metadata.architecture != WINDOWED:
        return [Full()] * sizes.layers
    window = Sliding(metadata.require_size("attention.sliding_window"))
    metadata.require_array("attention.sliding_window_pattern", bool)
    return [window if slides else Full() for slides in sizes.sliding_layers(1)]


def _recurrent_layer(w: TensorScope, sizes: TextSizes, states: StateSizes, index: int) -> TextLayer:
    mixer = Mamba2(w, hidden=sizes.hidden, sizes=states, eps=sizes.eps)
    block = _block_options(sizes).read(w, sizes, mixer, _feed_forward(w, sizes, index))
    return TextLayer(block, states.cache)


def _attending_layer(
    w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary | None, kind: CacheKind
) -> TextLayer:
    metadata, heads = sizes.metadata, sizes.heads[index]
    return attention_layer(
        w,
        sizes,
        index,
        rotary,
        kind=kind,
        attention=AttentionOptions(
            scale=metadata.get_positive("attention.scale", 1.0),
            sinks=read_sinks(w, heads) if metadata.architecture == WINDOWED else None,
        ),
        feed_forward=_feed_forward(w, sizes, index),
        block=_block_options(sizes),
    )


def _block_options(sizes: TextSizes) -> BlockOptions:
    return BlockOptions(residual_scale=sizes.metadata.get_positive("residual_scale", 1.0))


def _feed_forward(w: TensorScope, sizes: TextSizes, index: int) -> RowWise:
    """Files of dense models may state the width of a shared expert, too. In those of Granite Swash,
    the shared expert's gates and ups are one tensor."""
    metadata, shared = sizes.metadata, None
    width = metadata.get("expert_shared_feed_forward_length", int, 0)
    if width and metadata.get("expert_count", int, 0):
        whole = "ffn_up_shexp" if metadata.architecture == WINDOWED else None
        shared = GatedFeedForward(w, hidden=sizes.hidden, size=width, suffix="_shexp", whole=whole)
    return experts_or_dense(w, sizes, index, ExpertOptions(shared=shared))
