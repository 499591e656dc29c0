"""Nemotron-H, Nemotron Nano 2 and Nemotron 3, also the text model of Nemotron 3 Omni: each layer is
a Mamba 2 layer, attention, or a feed-forward with squared ReLU, which has experts in Nemotron 3."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import SelfAttention
from model_zoo.layers.block import MixerBlock, RowWise, RowWiseBlock
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.experts import ExpertOptions, Experts, ExpertSizes
from model_zoo.layers.feed_forward import FeedForward
from model_zoo.layers.hybrid import read_sizes, recurrent_layers
from model_zoo.layers.leading_dense import SIGMOID, stated_routing
from model_zoo.layers.mamba2 import Mamba2
from model_zoo.layers.state_sizes import StateSizes
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.pointwise import relu_squared
from runtime.kv.cache_kinds import Full

DENSE = "nemotron_h"  # the architecture without experts
# That of Ollama's files of Nemotron 3 Omni, and the prefixes of tensors for images and sounds.
OMNI, TOWERS = "nemotron_h_omni", ("a", "mm", "v")

LATENT = "moe_latent_size"


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Attention has no rotation. A layer with a feed-forward length is a feed-forward, another one
    attention if it has key heads. The vision and audio models of Nemotron 3 Omni are not loaded."""
    if metadata.architecture == OMNI:
        for tower in TOWERS:
            w.scope(tower).ignore_all()
    sizes, states = read_sizes(w, metadata), StateSizes.read(metadata)
    widths, recurrent = sizes.optional_feed_forward, recurrent_layers(sizes)
    layers = []
    for index in range(sizes.layers):
        scope = w.scope("blk", index)
        if widths[index]:
            layers.append(_feed_forward_layer(scope, sizes, index, widths[index]))
        elif recurrent[index]:
            layers.append(_recurrent_layer(scope, sizes, states))
        else:
            layers.append(_attending_layer(scope, sizes, index))
    return Decoder(w, sizes, layers)


def _recurrent_layer(w: TensorScope, sizes: TextSizes, states: StateSizes) -> TextLayer:
    norm = w.rms_norm("attn_norm", sizes.eps, size=sizes.hidden)
    mixer = Mamba2(w, hidden=sizes.hidden, sizes=states, eps=sizes.eps)
    return TextLayer(MixerBlock(norm, mixer), states.cache)


def _attending_layer(w: TensorScope, sizes: TextSizes, index: int) -> TextLayer:
    norm, cache = w.rms_norm("attn_norm", sizes.eps, size=sizes.hidden), sizes.cache(index, Full())
    return TextLayer(MixerBlock(norm, SelfAttention(w, sizes, index, cache)), cache)


def _feed_forward_layer(w: TensorScope, sizes: TextSizes, index: int, width: int) -> TextLayer:
    norm = w.rms_norm("attn_norm", sizes.eps, size=sizes.hidden)
    return TextLayer(RowWiseBlock(((norm, _feed_forward(w, sizes, index, width)),)), None)


def _feed_forward(w: TensorScope, sizes: TextSizes, index: int, width: int) -> RowWise:
    """The routing of experts is that of DeepSeek V3; in Nemotron 3 Super and Puzzle, they compute
    in a latent space. In Puzzle, their number and width differ between layers."""
    metadata, hidden = sizes.metadata, sizes.hidden
    if metadata.architecture == DENSE:
        return FeedForward(w, hidden=hidden, size=width, curve=relu_squared)
    counts = ExpertSizes.read(metadata, index)
    shared = FeedForward(
        w,
        hidden=hidden,
        size=metadata.require_size("expert_shared_feed_forward_length"),
        curve=relu_squared,
        up="ffn_up_shexp",
        down="ffn_down_shexp",
    )
    routing = stated_routing(w, metadata, counts.count, SIGMOID)
    latent = _latent_size(w, metadata)
    options = ExpertOptions(routing=routing, curve=relu_squared, shared=shared, latent=latent)
    return Experts(w, hidden, counts, options)


def _latent_size(w: TensorScope, metadata: Metadata) -> int | None:
    """The size of the experts' latent space, if there is one: stated, else that of the tensor.
    Ollama's converter does not state it."""
    shapes = (w.shape(name, dimensions=2) for name in ("ffn_latent_down", "ffn_latent_in"))
    size = next((shape[0] for shape in shapes if shape is not None), 0)
    return metadata.get_size(LATENT, size) if metadata.get(LATENT, int, size) else None
