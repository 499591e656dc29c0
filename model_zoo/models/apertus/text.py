"""Apertus: feed-forwards without gates, whose activation has other numbers in each layer."""

from collections.abc import Callable
from functools import partial
from math import exp, log1p

from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import head_norms
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer, uniform_decoder
from model_zoo.layers.feed_forward import FeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.xielu import xielu


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    return uniform_decoder(w, TextSizes.read(metadata), Pairs.NEOX, _layer)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    size, curve = sizes.feed_forward[index], _curve(sizes, index)
    return attention_layer(
        w,
        sizes,
        index,
        rotary,
        attention=head_norms(w, sizes),
        feed_forward=FeedForward(w, hidden=sizes.hidden, size=size, curve=curve),
    )


def _curve(sizes: TextSizes, index: int) -> Callable[[Tensor], Tensor]:
    """xIELU of a layer. Files have the alphas as they are trained; their softplus is used."""
    alpha_p, alpha_n, beta, eps = (
        _number(sizes, f"xielu.{name}", index) for name in ("alpha_p", "alpha_n", "beta", "eps")
    )
    negative = beta + _softplus(alpha_n)
    return partial(xielu, positive=_softplus(alpha_p), negative=negative, beta=beta, eps=eps)


def _number(sizes: TextSizes, key: str, index: int) -> float:
    """The number of a layer, from an array or from a single value."""
    metadata = sizes.metadata
    if metadata.length(key) is None:
        return metadata.require(key, float)
    numbers = metadata.require_array(key, float)
    if len(numbers) != sizes.layers:
        raise metadata.error(key, f"has {len(numbers):,} entries for {sizes.layers:,} layers")
    return numbers[index]


def _softplus(x: float) -> float:
    return max(x, 0.0) + log1p(exp(-abs(x)))
