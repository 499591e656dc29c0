"""Gated delta nets: recurrent layers with a state of fixed size."""

from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.state_sizes import StateSizes
from model_zoo.layers.step import Step
from runtime.kernels.activations import Activations, unrounded
from runtime.kernels.delta import DeltaGates, gated_delta, short_convolution
from runtime.kernels.pointwise import Gate, joined, silu_mul
from runtime.kernels.sequence_states import CHUNK


class GatedDeltaNet:
    """A short convolution of queries, keys and values, the gated delta rule, a norm of each head, a
    gate and a projection (Yang, Kautz and Hatamizadeh, "Gated Delta Networks").

    tiled: value head h uses key head h % key_heads, otherwise h // (heads / key_heads). gate: the
    curve of the gate.

    In the oldest files, `ssm_in` holds queries, keys, values and gates of each key head together.
    """

    def __init__(
        self,
        w: TensorScope,
        *,
        hidden: int,
        sizes: StateSizes,
        eps: float,
        tiled: bool,
        gate: Gate = silu_mul,
    ) -> None:
        self._sizes, self._tiled, self._gate = sizes, tiled, gate
        self._inputs = _Inputs(w, hidden, sizes)
        self._gates = _Gates(w, hidden, sizes)
        convolution = w.table("ssm_conv1d.weight", shape=(sizes.channels, sizes.width))
        self._convolution = convolution.t().contiguous()
        self._norm = w.rms_norm("ssm_norm", eps, size=sizes.value_dim)
        self._output = w.linear("ssm_out", shape=(hidden, sizes.values))
        expanded = sizes.heads * (6 * sizes.key_dim + 4 * sizes.value_dim + 9 * CHUNK)
        self.row_elements = 6 * (sizes.channels + sizes.values) + expanded
        self.matrix_elements = hidden * (sizes.channels + sizes.values)
        self.rounding = self._inputs.rounding

    def __call__(self, x: Activations, step: Step) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden], or [outputs, hidden] if `step.rows` selects
        rows."""
        mixed, gate = self._inputs(x)
        gates = self._gates(x)
        mixed = short_convolution(mixed, self._convolution, step.pages, step.plan)
        seen = gated_delta(
            mixed,
            gates,
            step.pages,
            step.plan,
            key_heads=self._sizes.key_heads,
            tiled=self._tiled,
        )
        heads = step.kept(seen.flatten(1)).unflatten(1, seen.shape[1:])
        normal = self._norm(heads).flatten(1)
        return self._output(self._gate(step.kept(gate), normal))


class _Inputs:
    """x [tokens, hidden] -> [tokens, channels] and the gate [tokens, values]."""

    def __init__(self, w: TensorScope, hidden: int, sizes: StateSizes) -> None:
        self._sizes = sizes
        self._grouped = w.has("ssm_in")
        matrices = {"attn_qkv": (sizes.channels, hidden), "attn_gate": (sizes.values, hidden)}
        if self._grouped:
            matrices = {"ssm_in": (sizes.channels + sizes.values, hidden)}
        self._matrices = w.fused_linear(matrices)
        self.rounding = self._matrices.rounding

    def __call__(self, x: Activations) -> tuple[Tensor, Tensor]:
        if not self._grouped:
            qkv, gate = self._matrices(x)
            return qkv, gate
        sizes, (whole,) = self._sizes, self._matrices(x)
        values = sizes.values // sizes.key_heads
        parts = whole.unflatten(1, (sizes.key_heads, -1)).split(
            (sizes.key_dim, sizes.key_dim, values, values), dim=2
        )
        *mixed, gate = [joined(part).flatten(1).unsqueeze(1) for part in parts]
        return joined(*mixed).squeeze(1), gate.squeeze(1)


class _Gates:
    """x [tokens, hidden] -> the gates of the heads, from one matrix or two.

    Computed in float32, because an error in the exponent of a decay grows with every following row.
    In a single matrix, the betas of each key head's values precede their alphas.
    """

    def __init__(self, w: TensorScope, hidden: int, sizes: StateSizes) -> None:
        self._key_heads = sizes.key_heads
        self._together = not w.has("ssm_beta") and not w.has("ssm_alpha")
        matrices = dict.fromkeys(("ssm_beta", "ssm_alpha"), (sizes.heads, hidden))
        if self._together:
            matrices = {"ssm_ba": (2 * sizes.heads, hidden)}
        self._matrices = w.fused_linear(matrices)
        self._rates = w.vector("ssm_a", size=sizes.heads, bare=True)
        offsets = w.vector("ssm_dt", size=sizes.heads, bare=True, optional=True)
        if offsets is None:
            offsets = w.table("ssm_dt.bias", shape=(sizes.heads,))
        self._offsets = offsets

    def __call__(self, x: Activations) -> DeltaGates:
        parts = self._matrices(unrounded(x).float())
        if self._together:
            pairs = parts[0].unflatten(1, (self._key_heads, 2, -1)).unbind(2)
            parts = tuple(joined(part).flatten(1) for part in pairs)
        betas, alphas = parts
        return DeltaGates(alphas, betas, self._rates, self._offsets)
