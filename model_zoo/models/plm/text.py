"""PLM: latent attention, and feed-forwards without gate whose activation is squared ReLU."""

from dataclasses import replace

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.block import BlockOptions
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.feed_forward import FeedForward
from model_zoo.layers.latent_attention import LatentAttention, LatentSizes
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.pointwise import relu_squared
from runtime.kv.cache_kinds import Full

_HEAD_KEYS = "attention.key_length", "attention.value_length"


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Rotary pairs are interleaved, as in the authors' checkpoints."""
    sizes = TextSizes.read(metadata)
    rotated = LatentSizes.read(w, metadata, heads=sizes.heads[0], keys=_HEAD_KEYS).rotated
    rotary = read_rotary(w, replace(sizes, key_dim=rotated), Pairs.INTERLEAVED)
    layers = [_layer(w.scope("blk", i), sizes, i, rotary) for i in range(sizes.layers)]
    return Decoder(w, sizes, layers)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    latent = LatentSizes.read(w, sizes.metadata, heads=sizes.heads[index], keys=_HEAD_KEYS)
    scale = latent.query**-0.5
    attention = LatentAttention(w, latent, hidden=sizes.hidden, eps=sizes.eps, scale=scale)
    size = sizes.feed_forward[index]
    feed_forward = FeedForward(w, hidden=sizes.hidden, size=size, curve=relu_squared)
    block = BlockOptions().read(w, sizes, attention, feed_forward)
    return TextLayer(block, latent.cache(Full()), rotary, rotated_from=latent.latent)
