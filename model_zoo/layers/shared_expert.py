"""A gated expert that processes every row."""

import torch
from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.linear import Linear
from runtime.kernels.activations import Activations
from runtime.kernels.experts import weighted_sum
from runtime.kernels.pointwise import sigmoid
from runtime.quant.block_types import block_type
from runtime.quant.weight import Weight


class SharedExpert:
    """sigmoid(gate . x) * feed_forward(x), from the tensors with `shexp` in their names."""

    def __init__(self, w: TensorScope, *, hidden: int, size: int) -> None:
        self._feed_forward = GatedFeedForward(w, hidden=hidden, size=size, suffix="_shexp")
        self._gate = _single_row(w, "ffn_gate_inp_shexp", hidden)
        self.row_elements = self._feed_forward.row_elements + 3 * hidden
        self.matrix_elements = self._feed_forward.matrix_elements
        self.rounding = self._feed_forward.rounding

    def __call__(self, x: Activations) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        return weighted_sum(self._feed_forward(x).unsqueeze(1), sigmoid(self._gate(x)))


def _single_row(w: TensorScope, name: str, hidden: int) -> Linear:
    """[tokens, hidden] -> [tokens, 1]; files store the row as a vector or as a matrix."""
    if len(w.shape(name) or ()) == 2:
        return w.linear(name, shape=(1, hidden))
    row = w.vector(name, size=hidden).view(torch.uint8).view(1, -1)
    weight = Weight(row, block_type("F32"), (1, hidden), deterministic=w.deterministic)
    return Linear(weight)
