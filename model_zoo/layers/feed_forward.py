"""Gated feed-forward layers."""

from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from runtime.kernels.pointwise import silu_mul


class SwiGLU:
    """down(silu(gate(x)) * up(x)); Shazeer, "GLU Variants Improve Transformer"."""

    def __init__(self, w: TensorScope, *, hidden: int, size: int) -> None:
        self._gate_up = w.fused_linear({"ffn_gate": (size, hidden), "ffn_up": (size, hidden)})
        self._down = w.linear("ffn_down", shape=(hidden, size))

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        gate, up = self._gate_up(x)
        return self._down(silu_mul(gate, up))
