"""Mamba 2: recurrent layers that are state spaces with one decay per head and row."""

from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.state_sizes import StateSizes
from model_zoo.layers.step import Step
from runtime.kernels.activations import Activations
from runtime.kernels.delta import short_convolution
from runtime.kernels.pointwise import silu_mul
from runtime.kernels.sequence_states import CHUNK
from runtime.kernels.state_space import StateSpace, state_space


class Mamba2:
    """A short convolution of values, keys and queries, the state space, a gate, a norm of each
    group, unless `normed` is False, and a projection (Dao and Gu, "Transformers are SSMs", section
    7).

    `ssm_in` has the rows of gates, values, keys (B), queries (C) and steps (dt). Unlike the gates
    of a delta net, the steps are in the model's type, because they are in the same matrix.
    """

    def __init__(
        self, w: TensorScope, *, hidden: int, sizes: StateSizes, eps: float, normed: bool = True
    ) -> None:
        heads, values, channels = sizes.heads, sizes.values, sizes.channels
        self._sizes = sizes
        self._parts = values, channels, heads
        self._input = w.linear("ssm_in", shape=(sum(self._parts), hidden))
        convolution = w.table("ssm_conv1d.weight", shape=(channels, sizes.width))
        self._convolution = convolution.t().contiguous()
        self._bias = w.table("ssm_conv1d.bias", shape=(channels,), optional=True)
        self._space = StateSpace(
            w.table("ssm_a", shape=(heads, 1)).flatten(),
            w.table("ssm_dt.bias", shape=(heads,)),
            w.table("ssm_d", shape=(heads, 1)).flatten(),
        )
        self._norm = RMSNorm(_norms_of_groups(w, sizes), eps) if normed else None
        self._output = w.linear("ssm_out", shape=(hidden, values))
        expanded = heads * (4 * sizes.key_dim + 5 * sizes.value_dim + 6 * CHUNK)
        self.row_elements = 6 * (channels + values) + expanded
        self.matrix_elements = hidden * sum(self._parts)
        self.rounding = self._input.rounding

    def __call__(self, x: Activations, step: Step) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden], or [outputs, hidden] if `step.rows` selects
        rows."""
        gate, mixed, steps = self._input(x).split(self._parts, dim=1)
        mixed = short_convolution(mixed, self._convolution, step.pages, step.plan, bias=self._bias)
        seen = state_space(
            mixed, steps, self._space, step.pages, step.plan, groups=self._sizes.key_heads
        )
        gated = silu_mul(step.kept(gate), step.kept(seen.flatten(1)))
        if self._norm is not None:
            gated = self._norm(gated.unflatten(1, (self._sizes.key_heads, -1))).flatten(1)
        return self._output(gated)


def _norms_of_groups(w: TensorScope, sizes: StateSizes) -> Tensor:
    """float32 [groups, values / groups]. llama.cpp writes that of a single group as a vector."""
    groups = sizes.key_heads
    if groups == 1:
        return w.vector("ssm_norm", size=sizes.values).unsqueeze(0)
    return w.table("ssm_norm.weight", shape=(groups, sizes.values // groups))
