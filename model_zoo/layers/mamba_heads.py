"""Mamba layers with heads: state spaces whose steps, keys and queries are projected from values, as
in PLaMo 2."""

from dataclasses import replace

from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.state_sizes import StateSizes
from model_zoo.layers.step import Step
from runtime.kernels.activations import Activations
from runtime.kernels.delta import short_convolution
from runtime.kernels.pointwise import contiguous, joined, silu_mul
from runtime.kernels.sequence_states import CHUNK
from runtime.kernels.state_space import StateSpace, state_space
from runtime.kv.states import Recurrent, StateCache


class MambaHeads:
    """A short convolution of values; keys (B), queries (C) and steps (dt) projected from these and
    normed; the state space of Mamba 2, whose heads share keys and queries; a gate and a projection.

    `ssm_in` has the rows of each head's gate and then its values, `ssm_x` those of keys, queries
    and a vector of `rank` elements, from which `ssm_dt` projects the steps. Their bias is added in
    float32.
    """

    def __init__(
        self, w: TensorScope, *, hidden: int, sizes: StateSizes, rank: int, eps: float
    ) -> None:
        heads, values, key_dim = sizes.heads, sizes.values, sizes.key_dim
        self._heads, self._parts = heads, (key_dim, key_dim, rank)
        self._input = w.linear("ssm_in", shape=(2 * values, hidden))
        convolution = w.table("ssm_conv1d.weight", shape=(values, sizes.width))
        self._convolution = convolution.t().contiguous()
        self._selected = w.linear("ssm_x", shape=(sum(self._parts), values))
        self._norms = [
            w.rms_norm(f"ssm_{name}_norm", eps, size=size)
            for name, size in zip(("b", "c", "dt"), self._parts, strict=True)
        ]
        self._steps = replace(w.linear("ssm_dt", shape=(heads, rank)), bias=None)
        self._space = StateSpace(
            w.vector("ssm_a", size=heads, bare=True),
            w.table("ssm_dt.bias", shape=(heads,)),
            w.vector("ssm_d", size=heads, bare=True),
        )
        self._output = w.linear("ssm_out", shape=(hidden, values))
        taps = sizes.width - 1
        self.cache = StateCache(Recurrent(), heads, key_dim, sizes.value_dim, values, taps)
        expanded = heads * (4 * key_dim + 5 * sizes.value_dim + 6 * CHUNK)
        self.row_elements = 12 * values + 4 * sum(self._parts) + expanded
        self.matrix_elements = values * max(2 * hidden, sum(self._parts))
        self.rounding = self._input.rounding

    def __call__(self, x: Activations, step: Step) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden], or [outputs, hidden] if `step.rows` selects
        rows."""
        gate, inner = self._input(x).unflatten(1, (self._heads, 2, -1)).unbind(2)
        values = short_convolution(
            contiguous(inner).flatten(1), self._convolution, step.pages, step.plan
        )
        keys, queries, steps = (
            norm(contiguous(part))
            for norm, part in zip(
                self._norms, self._selected(values).split(self._parts, dim=1), strict=True
            )
        )
        mixed = joined(*(part.unsqueeze(1) for part in (values, keys, queries))).squeeze(1)
        seen = state_space(mixed, self._steps(steps), self._space, step.pages, step.plan, groups=1)
        gate = step.kept(contiguous(gate).flatten(1))
        return self._output(silu_mul(gate, step.kept(seen.flatten(1))))
