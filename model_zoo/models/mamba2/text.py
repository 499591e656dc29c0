"""Mamba 2: recurrent layers without attention and feed-forwards."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.block import MixerBlock
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.mamba2 import Mamba2
from model_zoo.layers.state_sizes import StateSizes
from model_zoo.layers.text_sizes import TextSizes


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    sizes, states = TextSizes.read(metadata, attends=False), StateSizes.read(metadata)
    layers = [_layer(w.scope("blk", i), sizes, states) for i in range(sizes.layers)]
    return Decoder(w, sizes, layers)


def _layer(w: TensorScope, sizes: TextSizes, states: StateSizes) -> TextLayer:
    norm = w.rms_norm("attn_norm", sizes.eps, size=sizes.hidden)
    mixer = Mamba2(w, hidden=sizes.hidden, sizes=states, eps=sizes.eps)
    return TextLayer(MixerBlock(norm, mixer), states.cache)
