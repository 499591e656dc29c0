"""Feed-forward layers, with and without a gate."""

from collections.abc import Callable

from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from runtime.kernels.pointwise import silu_mul


class GatedFeedForward:
    """down(gated(gate(x), up(x))); Shazeer, "GLU Variants Improve Transformer".

    `gated`: silu_mul for SwiGLU, gelu_mul for GeGLU. `whole`: a tensor that may hold the rows of
    gate and then of up.
    """

    def __init__(
        self,
        w: TensorScope,
        *,
        hidden: int,
        size: int,
        gated: Callable[[Tensor, Tensor], Tensor] = silu_mul,
        gate: str = "ffn_gate",
        up: str = "ffn_up",
        down: str = "ffn_down",
        whole: str | None = None,
    ) -> None:
        self._gated = gated
        self._gate_up = w.fused_linear({gate: (size, hidden), up: (size, hidden)}, whole=whole)
        self._down = w.linear(down, shape=(hidden, size))
        self.row_elements = 6 * size
        self.matrix_elements = 2 * hidden * size

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        gate, up = self._gate_up(x)
        return self._down(self._gated(gate, up))


class FeedForward:
    """down(curve(up(x))): as before gates, with biases where the file has them."""

    def __init__(
        self,
        w: TensorScope,
        *,
        hidden: int,
        size: int,
        curve: Callable[[Tensor], Tensor],
        up: str = "ffn_up",
        down: str = "ffn_down",
    ) -> None:
        self._curve = curve
        self._up = w.linear(up, shape=(size, hidden))
        self._down = w.linear(down, shape=(hidden, size))
        self.row_elements = 4 * size
        self.matrix_elements = hidden * size

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        return self._down(self._curve(self._up(x)))
