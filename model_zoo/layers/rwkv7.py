"""Layers of RWKV 7: a time mix, whose states are matrices, and a channel mix. Both mix each row
with the one before it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.gguf.tensors import derived
from model_zoo.layers.norm import LayerNorm
from model_zoo.layers.step import Step
from runtime.kernels.delta import short_convolution
from runtime.kernels.pointwise import (
    add_,
    contiguous,
    joined,
    mul,
    relu_squared,
    scale_,
    sigmoid,
    softcap,
)
from runtime.kernels.wkv import WkvHeads, WkvRows, wkv7
from runtime.kv.states import Recurrent, StateCache

# The epsilon of the norms of what heads answer, which files do not state.
HEADS_EPS = 64e-5
# Mixtures of a row and the one before it: for queries, decays, keys, values, rates and gates.
MIXTURES = 6


@dataclass(frozen=True, slots=True)
class RWKVSizes:
    """head: size of a head. decay, rate, value, gate: ranks of the products from which these are
    computed."""

    hidden: int
    head: int
    decay: int
    rate: int
    value: int
    gate: int

    @property
    def cache(self) -> StateCache:
        """The state of a time mix."""
        heads, inputs = self.hidden // self.head, MIXTURES * self.hidden
        return StateCache(Recurrent(), heads, self.head, self.head, inputs, 1)

    @property
    def shifted(self) -> StateCache:
        """The state of a channel mix."""
        return StateCache.of_inputs(self.hidden, 1)


class FirstValues:
    """Streams of which the first is the residual and the second, after the first layer, has its
    values."""

    def spread(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, 2, hidden]."""
        return _side_by_side(x, x)

    def gather(self, x: Tensor) -> Tensor:
        """x [tokens, 2, hidden] -> [tokens, hidden]."""
        return contiguous(x[:, 0])


class RWKVBlock:
    """x + time mix(norm(x)), then x + channel mix(norm(x)), of the first of the streams.

    number: of the layer. The time mix has the layer's first cache, the channel mix the other one.
    """

    def __init__(
        self, w: TensorScope, sizes: RWKVSizes, *, number: int, inner: int, eps: float
    ) -> None:
        hidden = sizes.hidden
        w.need_biases("attn_norm", "attn_norm_2")
        self._time_norm, self._channel_norm = (
            w.layer_norm(name, eps, size=hidden) for name in ("attn_norm", "attn_norm_2")
        )
        self._begins = number == 0
        self._time_mix = _TimeMix(w, sizes, begins=self._begins)
        self._channel_mix = _ChannelMix(w, hidden=hidden, inner=inner)
        self.row_elements = (6 * MIXTURES + 16) * hidden + 3 * inner
        self.matrix_elements = hidden * max(hidden, inner)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x [tokens, 2, hidden] -> the same shape, or [outputs, 2, hidden] if `step.rows` selects
        rows."""
        assert step.beside is not None, "the layer declares one cache"
        residual, first = contiguous(x[:, 0]), None if self._begins else contiguous(x[:, 1])
        mixed, values = self._time_mix(self._time_norm(residual), first, step)
        residual = add_(mixed, residual)
        added = self._channel_mix(self._channel_norm(residual), step.beside)
        kept = values if first is None else first
        return _side_by_side(add_(added, step.kept(residual)), step.kept(kept))


class _TimeMix:
    """Peng et al., "RWKV-7", section 4. The first layer `begins` the values that those of later
    layers are mixed with; its files have matrices for that which nothing uses."""

    def __init__(self, w: TensorScope, sizes: RWKVSizes, *, begins: bool) -> None:
        hidden, heads = sizes.hidden, sizes.hidden // sizes.head
        fused = w.table("time_mix_lerp_fused.weight", shape=(MIXTURES, 1, 1, hidden))
        self._shift = _TokenShift(fused.view(MIXTURES, hidden))
        self._queries, self._keys, self._values, self._output = (
            w.linear(f"time_mix_{name}", shape=(hidden, hidden))
            for name in ("receptance", "key", "value", "output")
        )
        self._decays = _Factored(w, "w", hidden, sizes.decay, _tanh)
        self._rates = _Factored(w, "a", hidden, sizes.rate)
        self._gates = _Factored(w, "g", hidden, sizes.gate, sigmoid, biased=False)
        self._shares = None if begins else _Factored(w, "v", hidden, sizes.value)
        if begins:
            w.ignore(*(f"time_mix_v{part}" for part in range(3)))
        removed, added, own = (
            w.vector(f"time_mix_{name}", size=hidden) for name in ("k_k", "k_a", "r_k")
        )
        self._heads = WkvHeads(removed, added, own)
        w.need_biases("time_mix_ln")
        norm, shape = w.layer_norm("time_mix_ln", HEADS_EPS, size=hidden), (heads, sizes.head)
        self._norm = LayerNorm(norm.weight.view(shape), norm.bias.view(shape), norm.eps)

    def __call__(self, x: Tensor, first: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        """x, first: [tokens, hidden], the latter the first layer's values -> the result and this
        layer's values, likewise. The decays are computed in float32, because errors in their
        exponents grow with every following row."""
        queries, decays, keys, values, rates, gates = self._shift(x, step)
        stored = self._values(values)
        if first is not None:
            assert self._shares is not None
            stored = _towards(stored, first, sigmoid(self._shares(values)))
        rows = WkvRows(
            self._queries(queries),
            self._decays(decays.float()),
            self._keys(keys),
            stored,
            self._rates(rates),
        )
        answers, own = wkv7(rows, self._heads, step.pages, step.plan)
        normed = add_(self._norm(answers).flatten(1), own.flatten(1))
        return self._output(mul(self._gates(gates), normed)), stored


class _ChannelMix:
    """down(max(up(mixture), 0)^2)."""

    def __init__(self, w: TensorScope, *, hidden: int, inner: int) -> None:
        self._shift = _TokenShift(w.vector("channel_mix_lerp_k", size=hidden).unsqueeze(0))
        self._up = w.linear("channel_mix_key", shape=(inner, hidden))
        self._down = w.linear("channel_mix_value", shape=(hidden, inner))

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden], or [outputs, hidden] if `step.rows` selects
        rows."""
        (mixture,) = self._shift(x, step)
        return self._down(relu_squared(self._up(step.kept(mixture))))


class _TokenShift:
    """Mixtures of each row and the one before it; shares [mixtures, hidden]: of the latter.

    Convolutions over two rows, so the states hold a row for each mixture.
    """

    def __init__(self, shares: Tensor) -> None:
        self._count = len(shares)
        self._weight = derived(_before_and_own, shares)

    def __call__(self, x: Tensor, step: Step) -> list[Tensor]:
        """x [tokens, hidden] -> the mixtures, likewise."""
        inputs = joined(*self._count * [x.unsqueeze(1)]).squeeze(1) if self._count > 1 else x
        mixed = short_convolution(inputs, self._weight, step.pages, step.plan, curved=False)
        return [contiguous(part) for part in mixed.chunk(self._count, dim=1)]


class _Factored:
    """A product of the two matrices of this name, with a curve between them, and a bias."""

    def __init__(
        self,
        w: TensorScope,
        name: str,
        hidden: int,
        rank: int,
        curve: Callable[[Tensor], Tensor] | None = None,
        *,
        biased: bool = True,
    ) -> None:
        self._into = w.linear(f"time_mix_{name}1", shape=(rank, hidden))
        out_of = w.linear(f"time_mix_{name}2", shape=(hidden, rank))
        bias = w.vector(f"time_mix_{name}0", size=hidden) if biased else None
        self._out_of, self._curve = replace(out_of, bias=bias), curve

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> likewise."""
        inner = self._into(x)
        return self._out_of(inner if self._curve is None else self._curve(inner))


def _before_and_own(shares: Tensor) -> Tensor:
    """The factors of the row before and of the row itself, [2, mixtures * hidden]."""
    return torch.stack([shares.flatten(), 1 - shares.flatten()])


def _tanh(x: Tensor) -> Tensor:
    return softcap(x, 1.0)


def _towards(x: Tensor, goal: Tensor, share: Tensor) -> Tensor:
    """x + (goal - x) * share; [tokens, n] each."""
    left = add_(scale_(mul(share, x), -1.0), x)
    return add_(left, mul(share, goal))


def _side_by_side(first: Tensor, second: Tensor) -> Tensor:
    """[tokens, n] each -> [tokens, 2, n]."""
    pair = joined(first.unsqueeze(1), second.unsqueeze(1))
    return pair.view(len(first), 2, first.shape[1])
