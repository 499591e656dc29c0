"""Granite 3 and 4, dense and with experts: Llama with multipliers of embeddings, residuals and
logits; in Granite 4.0 H, most layers are Mamba 2."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import AttentionOptions
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

HYBRID = "granitehybrid"  # the architecture of Granite 4.0 H


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Rotary pairs are interleaved: converters have permuted the rows of attn_q and attn_k.

    Multipliers are 1 by default, as in GraniteConfig of `transformers`.
    """
    hybrid = metadata.architecture == HYBRID
    sizes = read_sizes(w, metadata) if hybrid else TextSizes.read(metadata)
    states = StateSizes.read(metadata) if hybrid else None
    recurrent = recurrent_layers(sizes) if hybrid else (False,) * sizes.layers
    rotary = _rotary(w, sizes)
    layers = []
    for index in range(sizes.layers):
        scope = w.scope("blk", index)
        if states is not None and recurrent[index]:
            layers.append(_recurrent_layer(scope, sizes, states, index))
        else:
            layers.append(_attending_layer(scope, sizes, index, rotary))
    options = DecoderOptions(
        embedding_scale=metadata.get_positive("embedding_scale", 1.0),
        scales_images=True,
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


def _recurrent_layer(w: TensorScope, sizes: TextSizes, states: StateSizes, index: int) -> TextLayer:
    mixer = Mamba2(w, hidden=sizes.hidden, sizes=states, eps=sizes.eps)
    block = _block_options(sizes).read(w, sizes, mixer, _feed_forward(w, sizes, index))
    return TextLayer(block, states.cache)


def _attending_layer(
    w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary | None
) -> TextLayer:
    return attention_layer(
        w,
        sizes,
        index,
        rotary,
        attention=AttentionOptions(scale=sizes.metadata.get_positive("attention.scale", 1.0)),
        feed_forward=_feed_forward(w, sizes, index),
        block=_block_options(sizes),
    )


def _block_options(sizes: TextSizes) -> BlockOptions:
    return BlockOptions(residual_scale=sizes.metadata.get_positive("residual_scale", 1.0))


def _feed_forward(w: TensorScope, sizes: TextSizes, index: int) -> RowWise:
    """Files of dense models may state the width of a shared expert, too."""
    metadata, shared = sizes.metadata, None
    width = metadata.get("expert_shared_feed_forward_length", int, 0)
    if width and metadata.get("expert_count", int, 0):
        shared = GatedFeedForward(w, hidden=sizes.hidden, size=width, suffix="_shexp")
    return experts_or_dense(w, sizes, index, ExpertOptions(shared=shared))
