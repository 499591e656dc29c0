"""Dense feed-forwards, with and without a gate; ranks divide the inner columns."""

from collections.abc import Callable

from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.tensor_parallel import divided_width
from runtime.kernels.activations import Activations
from runtime.kernels.pointwise import Gate, silu_mul


class GatedFeedForward:
    """down(norm(gated(gate(x), up(x)))); Shazeer, "GLU Variants Improve Transformer".

    `gated`: silu_mul for SwiGLU, gelu_mul for GeGLU. `prefix` and `suffix` surround `gate`, `up`
    and `down` in the tensor names. `whole`: name of a tensor that may hold the rows of gate
    followed by those of up instead. `norm`: None for none; ranks cannot divide one.
    """

    def __init__(
        self,
        w: TensorScope,
        *,
        hidden: int,
        size: int,
        gated: Gate = silu_mul,
        prefix: str = "ffn_",
        suffix: str = "",
        whole: str | None = None,
        norm: RMSNorm | None = None,
    ) -> None:
        gate, up, down = (f"{prefix}{name}{suffix}" for name in ("gate", "up", "down"))
        self._gated, self._norm = gated, norm
        split = divided_width(w, size, down)
        assert norm is None or split.whole
        shapes = {gate: (size, hidden), up: (size, hidden)}
        self._gate_up = w.fused_linear(shapes, whole=whole, outs=(split, split))
        self._down = w.merging_linear(down, shape=(hidden, size), ins=split)
        self.row_elements = 6 * split.count + self._down.row_elements
        self.matrix_elements = 2 * hidden * split.count
        self.rounding = self._gate_up.rounding

    def __call__(self, x: Activations) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        inner = self._gate_up.gated(x, self._gated)
        return self._down(inner if self._norm is None else self._norm(inner))


class FeedForward:
    """down(curve(up(x))), with biases if the file has them."""

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
        split = divided_width(w, size, down)
        self._up = w.linear(up, shape=(size, hidden), outs=split)
        self._down = w.merging_linear(down, shape=(hidden, size), ins=split)
        self.row_elements = 4 * split.count + self._down.row_elements
        self.matrix_elements = hidden * split.count
        self.rounding = self._up.rounding

    def __call__(self, x: Activations) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        return self._down(self._curve(self._up(x)))
