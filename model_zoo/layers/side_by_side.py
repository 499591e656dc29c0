"""Two mixers of a layer that compute from the same input."""

from torch import Tensor

from model_zoo.layers.block import Mixer
from model_zoo.layers.step import Step
from runtime.kernels.activations import Activations
from runtime.kernels.pointwise import add_


class SideBySide:
    """first(x) + beside(x); the second mixer uses the cache `TextLayer.beside`."""

    def __init__(self, first: Mixer, beside: Mixer) -> None:
        self._first, self._beside = first, beside
        self.row_elements = first.row_elements + beside.row_elements
        self.matrix_elements = max(first.matrix_elements, beside.matrix_elements)
        self.rounding = first.rounding or beside.rounding

    def __call__(self, x: Activations, step: Step) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden], or [outputs, hidden] if `step.rows` selects
        rows."""
        assert step.beside is not None, "the layer declares one cache"
        return add_(self._first(x, step), self._beside(x, step.beside))
