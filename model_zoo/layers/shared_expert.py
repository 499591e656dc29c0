"""A gated expert that processes every row."""

from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.feed_forward import GatedFeedForward
from runtime.kernels.activations import Activations
from runtime.kernels.experts import weighted_sum
from runtime.kernels.pointwise import sigmoid


class SharedExpert:
    """sigmoid(gate . x) * feed_forward(x), from the tensors with `shexp` in their names."""

    def __init__(self, w: TensorScope, *, hidden: int, size: int) -> None:
        self._feed_forward = GatedFeedForward(w, hidden=hidden, size=size, suffix="_shexp")
        self._gate = w.linear("ffn_gate_inp_shexp", shape=(1, hidden))
        self.row_elements = self._feed_forward.row_elements + 3 * hidden
        self.matrix_elements = self._feed_forward.matrix_elements
        self.rounding = self._feed_forward.rounding

    def __call__(self, x: Activations) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        return weighted_sum(self._feed_forward(x).unsqueeze(1), sigmoid(self._gate(x)))
