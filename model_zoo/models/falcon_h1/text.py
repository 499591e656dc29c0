"""Falcon H1: attention and a Mamba 2 mixer side by side in each layer.

Converters have multiplied the matrices by the multipliers of the authors' checkpoints.
"""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import SelfAttention
from model_zoo.layers.block import BlockOptions
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.mamba2 import Mamba2
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.side_by_side import SideBySide
from model_zoo.layers.state_sizes import StateSizes
from model_zoo.layers.text_sizes import TextSizes
from runtime.kv.spec import Full


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """All Mamba 2 mixers have a norm, or none has."""
    sizes, states = TextSizes.read(metadata), StateSizes.read(metadata)
    rotary = read_rotary(w, sizes, Pairs.NEOX)
    scopes = [w.scope("blk", index) for index in range(sizes.layers)]
    normed = any(scope.has("ssm_norm") for scope in scopes)
    layers = [
        _layer(scope, sizes, index, states, rotary, normed=normed)
        for index, scope in enumerate(scopes)
    ]
    return Decoder(w, sizes, layers)


def _layer(
    w: TensorScope,
    sizes: TextSizes,
    index: int,
    states: StateSizes,
    rotary: Rotary,
    *,
    normed: bool,
) -> TextLayer:
    cache = sizes.cache(index, Full())
    mixer = SideBySide(
        SelfAttention(w, sizes, index, cache),
        Mamba2(w, hidden=sizes.hidden, sizes=states, eps=sizes.eps, normed=normed),
    )
    feed_forward = GatedFeedForward(w, hidden=sizes.hidden, size=sizes.feed_forward[index])
    block = BlockOptions().read(w, sizes, mixer, feed_forward)
    return TextLayer(block, cache, rotary, beside=states.cache)
