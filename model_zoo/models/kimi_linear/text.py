"""Kimi Linear: Kimi's delta attention, and latent attention without rotation in every fourth
layer; experts after leading dense layers."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.block import Block, BlockOptions, Mixer
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.hybrid import read_sizes, recurrent_layers
from model_zoo.layers.kimi_delta import KimiDelta
from model_zoo.layers.latent_attention import LatentAttention, LatentSizes
from model_zoo.layers.leading_dense import SIGMOID, leading_dense_or_experts
from model_zoo.layers.state_sizes import MAX_TAPS, StateSizes
from model_zoo.layers.text_sizes import MAX_HEAD_DIM, TextSizes
from runtime.kv.cache_kinds import Full

HEAD_DIM = "kda.head_dim"


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Layers without key heads are recurrent; these have as many heads as attention."""
    sizes = read_sizes(w, metadata)
    recurrent = recurrent_layers(sizes)
    scopes = [w.scope("blk", i) for i in range(sizes.layers)]
    layers = [
        _recurrent_layer(scope, sizes, i) if recurrent[i] else _attending_layer(scope, sizes, i)
        for i, scope in enumerate(scopes)
    ]
    return Decoder(w, sizes, layers)


def _recurrent_layer(w: TensorScope, sizes: TextSizes, index: int) -> TextLayer:
    metadata, heads = sizes.metadata, sizes.heads[index]
    dim = metadata.require_size(HEAD_DIM, at_most=MAX_HEAD_DIM)
    width = metadata.require_size("ssm.conv_kernel", at_most=MAX_TAPS)
    states = StateSizes(heads=heads, key_heads=heads, key_dim=dim, value_dim=dim, width=width)
    mixer = KimiDelta(w, hidden=sizes.hidden, sizes=states, eps=sizes.eps)
    return TextLayer(_block(w, sizes, mixer, index), states.cache)


def _attending_layer(w: TensorScope, sizes: TextSizes, index: int) -> TextLayer:
    latent = LatentSizes.read(w, sizes.metadata, heads=sizes.heads[index])
    scale = latent.query**-0.5
    attention = LatentAttention(w, latent, hidden=sizes.hidden, eps=sizes.eps, scale=scale)
    return TextLayer(_block(w, sizes, attention, index), latent.cache(Full()))


def _block(w: TensorScope, sizes: TextSizes, mixer: Mixer, index: int) -> Block:
    experts = leading_dense_or_experts(w, sizes, index, scores=SIGMOID, renormalised=True)
    return BlockOptions().read(w, sizes, mixer, experts)
