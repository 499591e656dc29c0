"""Falcon H1: attention and a Mamba 2 mixer side by side in each layer.

Converters have multiplied the matrices by the multipliers of the authors' checkpoints.
"""

from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import SelfAttention
from model_zoo.layers.block import BlockOptions, Mixer
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.mamba2 import Mamba2
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.state_sizes import StateSizes
from model_zoo.layers.step import Step
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.activations import Activations
from runtime.kernels.pointwise import add_
from runtime.kv.cache_kinds import Full


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
    mixer = _SideBySide(
        SelfAttention(w, sizes, index, cache),
        Mamba2(w, hidden=sizes.hidden, sizes=states, eps=sizes.eps, normed=normed),
    )
    feed_forward = GatedFeedForward(w, hidden=sizes.hidden, size=sizes.feed_forward[index])
    block = BlockOptions().read(w, sizes, mixer, feed_forward)
    return TextLayer(block, cache, rotary, beside=states.cache)


class _SideBySide:
    """first(x) + beside(x); the second mixer uses the cache `TextLayer.beside`."""

    def __init__(self, first: Mixer, beside: Mixer) -> None:
        self._first, self._beside = first, beside
        self.row_elements = first.row_elements + beside.row_elements
        self.matrix_elements = max(first.matrix_elements, beside.matrix_elements)
        self.rounding = first.rounding or beside.rounding

    def __call__(self, x: Activations, step: Step) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden], or [outputs, hidden] if `step.rows` selects
        rows."""
        assert step.beside is not None, "the layer has only one cache"
        return add_(self._first(x, step), self._beside(x, step.beside))
