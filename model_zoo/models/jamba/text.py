"""Jamba: Mamba layers, attention without rotation in some layers, experts in some."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.block import BlockOptions, RowWise
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.experts import ExpertOptions, Experts
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.hybrid import read_sizes, recurrent_layers
from model_zoo.layers.mamba import Mamba, ScanSizes
from model_zoo.layers.routing import SOFTMAX_OF_ALL
from model_zoo.layers.text_sizes import TextSizes


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    sizes, scan = read_sizes(w, metadata), ScanSizes.read(metadata)
    layers = []
    for index, recurs in enumerate(recurrent_layers(sizes)):
        scope = w.scope("blk", index)
        feed_forward = _feed_forward(scope, sizes, index)
        if recurs:
            layers.append(_recurrent_layer(scope, sizes, scan, feed_forward))
        else:
            layers.append(attention_layer(scope, sizes, index, None, feed_forward=feed_forward))
    return Decoder(w, sizes, layers)


def _recurrent_layer(
    w: TensorScope, sizes: TextSizes, scan: ScanSizes, feed_forward: RowWise
) -> TextLayer:
    norms = [
        w.rms_norm(f"ssm_{name}_norm", sizes.eps, size=size)
        for name, size in zip(("dt", "b", "c"), scan.selected, strict=True)
    ]
    mixer = Mamba(w, hidden=sizes.hidden, sizes=scan, norms=norms)
    return TextLayer(BlockOptions().read(w, sizes, mixer, feed_forward), scan.cache)


def _feed_forward(w: TensorScope, sizes: TextSizes, index: int) -> RowWise:
    """Files do not state which layers have experts. Their weights are probabilities over all."""
    if w.has("ffn_gate_inp") or w.has("ffn_down_exps"):
        return Experts.read(w, sizes, ExpertOptions(routing=SOFTMAX_OF_ALL))
    return GatedFeedForward(w, hidden=sizes.hidden, size=sizes.feed_forward[index])
