"""Kimi's delta attention: recurrent layers in which each element of a key decays by itself."""

import torch
from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.gguf.tensors import derived
from model_zoo.layers.state_sizes import StateSizes
from model_zoo.layers.step import Step
from runtime.kernels.activations import Activations, unrounded
from runtime.kernels.delta import DeltaGates, gated_delta, short_convolution
from runtime.kernels.pointwise import joined, sigmoid_mul
from runtime.kernels.sequence_states import CHUNK


class KimiDelta:
    """A short convolution of queries, keys and values, the gated delta rule, a norm of each head, a
    gate and a projection (Kimi Team, "Kimi Linear", section 4).

    Each head has its own keys, as wide as its values. Gates of decay and of the result are products
    of two matrices, `ssm_f_a` and `ssm_f_b`, `ssm_g_a` and `ssm_g_b`.
    """

    def __init__(self, w: TensorScope, *, hidden: int, sizes: StateSizes, eps: float) -> None:
        assert (sizes.key_heads, sizes.key_dim) == (sizes.heads, sizes.value_dim)
        self._sizes, inner, rank = sizes, sizes.values, sizes.value_dim
        shapes = dict.fromkeys(("attn_q", "attn_k", "attn_v"), (inner, hidden))
        self._inputs = w.fused_linear(shapes, whole="attn_qkv")
        self._convolution = _convolution(w, sizes)
        self._decays, self._gates = (
            (
                w.linear(f"ssm_{name}_a", shape=(rank, hidden)),
                w.linear(f"ssm_{name}_b", shape=(inner, rank)),
            )
            for name in ("f", "g")
        )
        self._strengths = w.linear("ssm_beta", shape=(sizes.heads, hidden))
        self._rates = _squeezed(
            w, "ssm_a", (sizes.heads,), ((sizes.heads, 1), (1, 1, sizes.heads, 1))
        )
        self._offsets = w.table("ssm_dt.bias", shape=(inner,))
        self._norm = w.rms_norm("ssm_norm", eps, size=sizes.value_dim)
        self._output = w.linear("attn_output", shape=(hidden, inner))
        expanded = sizes.heads * (6 * sizes.key_dim + 4 * sizes.value_dim + 9 * CHUNK)
        self.row_elements = 8 * (sizes.channels + sizes.values) + 2 * hidden + expanded
        self.matrix_elements = hidden * sizes.channels
        self.rounding = self._inputs.rounding

    def __call__(self, x: Activations, step: Step) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden], or [outputs, hidden] if `step.rows` selects
        rows."""
        parts = (part.unsqueeze(1) for part in self._inputs(x))
        mixed = short_convolution(
            joined(*parts).squeeze(1), self._convolution, step.pages, step.plan
        )
        seen = gated_delta(
            mixed,
            self._delta_gates(unrounded(x).float()),
            step.pages,
            step.plan,
            key_heads=self._sizes.key_heads,
            tiled=False,
        )
        heads = step.kept(seen.flatten(1)).unflatten(1, seen.shape[1:])
        normal = self._norm(heads).flatten(1)
        into, out_of = self._gates
        return self._output(sigmoid_mul(out_of(into(step.kept(unrounded(x)))), normal))

    def _delta_gates(self, x: Tensor) -> DeltaGates:
        """Computed in float32, because an error in the exponent of a decay grows with every
        following row."""
        into, out_of = self._decays
        return DeltaGates(out_of(into(x)), self._strengths(x), self._rates, self._offsets)


def _convolution(w: TensorScope, sizes: StateSizes) -> Tensor:
    """The factors of queries, keys and values, [width, channels]."""
    inner, width = sizes.values, sizes.width
    others = (inner, 1, width), (1, inner, 1, width)
    parts = (_squeezed(w, f"ssm_conv1d_{name}.weight", (inner, width), others) for name in "qkv")
    return derived(lambda *read: torch.cat(read).t().contiguous(), *parts)


def _squeezed(
    w: TensorScope, name: str, shape: tuple[int, ...], others: tuple[tuple[int, ...], ...]
) -> Tensor:
    """The tensor in this shape; files may have it in one of the others, with the same elements."""
    stored = w.shape(name, whole=True)
    found = stored if stored is not None and stored in others else shape
    return w.table(name, shape=found).view(shape)
