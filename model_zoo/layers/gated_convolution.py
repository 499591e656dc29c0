"""Gated short convolutions: recurrent layers whose state is their last inputs."""

from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.state_sizes import MAX_TAPS
from model_zoo.layers.step import Step
from runtime.kernels.activations import Activations
from runtime.kernels.delta import short_convolution
from runtime.kernels.pointwise import mul
from runtime.kv.states import StateCache


class GatedConvolution:
    """output(c * convolution(b * v)): `shortconv.in_proj` has the rows of b, then c, then v, and
    the convolution of each channel covers `width` rows, the last of which is the row itself.

    Liquid AI, "LFM2 Technical Report", section 2. The channels are those of the residual.
    """

    def __init__(self, w: TensorScope, *, hidden: int, width: int) -> None:
        self._inputs = w.linear("shortconv.in_proj", shape=(3 * hidden, hidden))
        weight = w.table("shortconv.conv.weight", shape=(hidden, width))
        self._weight = weight.t().contiguous()
        self._output = w.linear("shortconv.out_proj", shape=(hidden, hidden))
        self.cache = StateCache.of_inputs(hidden, width - 1)
        self.row_elements = 8 * hidden
        self.matrix_elements = 3 * hidden * hidden
        self.rounding = self._inputs.rounding

    def __call__(self, x: Activations, step: Step) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden], or [outputs, hidden] if `step.rows` selects
        rows."""
        before, after, values = self._inputs(x).chunk(3, dim=1)
        inputs = mul(before, values)
        summed = short_convolution(inputs, self._weight, step.pages, step.plan, curved=False)
        return self._output(mul(step.kept(after), step.kept(summed)))


def convolution_width(metadata: Metadata) -> int:
    """The number of rows that convolutions cover, 2 or more; ModelFileError for others."""
    key = "shortconv.l_cache"
    width = metadata.require_size(key, at_most=MAX_TAPS)
    if width < 2:
        raise metadata.error(key, f"is {width}; it must be 2 or more")
    return width
