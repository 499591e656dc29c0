"""Mamba: recurrent layers that are selective scans, with one state per channel."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.state_sizes import MAX_HEADS, MAX_TAPS
from model_zoo.layers.step import Step
from model_zoo.layers.text_sizes import MAX_HEAD_DIM
from runtime.kernels.activations import Activations
from runtime.kernels.delta import short_convolution
from runtime.kernels.pointwise import contiguous, silu_mul
from runtime.kernels.selective_scan import Channels, ScanRows, selective_scan
from runtime.kv.states import Recurrent, StateCache


@dataclass(frozen=True, slots=True)
class ScanSizes:
    """channels: number of channels, each with a state of `state` elements. rank: size of the vector
    from which a row's steps are projected. width: taps of the convolution."""

    channels: int
    state: int
    rank: int
    width: int

    @classmethod
    def read(cls, metadata: Metadata) -> "ScanSizes":
        """Raises ModelFileError for missing or impossible sizes."""
        most = MAX_HEADS * MAX_HEAD_DIM
        return cls(
            metadata.require_size("ssm.inner_size", at_most=most),
            metadata.require_size("ssm.state_size", at_most=MAX_HEAD_DIM),
            metadata.require_size("ssm.time_step_rank", at_most=most),
            metadata.require_size("ssm.conv_kernel", at_most=MAX_TAPS),
        )

    @property
    def selected(self) -> tuple[int, int, int]:
        """The sizes of a row's vector for steps, its key (B) and its query (C)."""
        return self.rank, self.state, self.state

    @property
    def cache(self) -> StateCache:
        """The state that a layer stores per sequence."""
        taps = self.width - 1
        return StateCache(Recurrent(), self.channels, self.state, 1, self.channels, taps)


class Mamba:
    """A short convolution of values; steps (dt), keys (B) and queries (C) projected from these and
    normed by `norms`, if there are any; the selective scan, a gate and a projection (Gu and Dao,
    "Mamba", section 3.4).

    `ssm_in` has the rows of values and gates. Of the steps, the bias is added in float32.
    """

    def __init__(
        self, w: TensorScope, *, hidden: int, sizes: ScanSizes, norms: Sequence[RMSNorm] = ()
    ) -> None:
        channels, rank = sizes.channels, sizes.rank
        self._sizes, self._norms = sizes, norms
        self._input = w.linear("ssm_in", shape=(2 * channels, hidden))
        convolution = w.table("ssm_conv1d.weight", shape=(channels, sizes.width))
        self._convolution = convolution.t().contiguous()
        self._bias = w.table("ssm_conv1d.bias", shape=(channels,), optional=True)
        self._selected = w.linear("ssm_x", shape=(sum(sizes.selected), channels))
        self._steps = replace(w.linear("ssm_dt", shape=(channels, rank)), bias=None)
        self._channels = Channels(
            w.table("ssm_a", shape=(channels, sizes.state)),
            w.table("ssm_dt.bias", shape=(channels,)),
            w.table("ssm_d", shape=(channels,)),
        )
        self._output = w.linear("ssm_out", shape=(hidden, channels))
        self.row_elements = 12 * channels + 4 * sum(sizes.selected)
        self.matrix_elements = channels * max(2 * hidden, rank)
        self.rounding = self._input.rounding

    def __call__(self, x: Activations, step: Step) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden], or [outputs, hidden] if `step.rows` selects
        rows."""
        values, gate = self._input(x).chunk(2, dim=1)
        values = short_convolution(
            values, self._convolution, step.pages, step.plan, bias=self._bias
        )
        selected = self._selected(values).split(self._sizes.selected, dim=1)
        parts = [contiguous(part) for part in selected]
        if self._norms:
            parts = [norm(part) for norm, part in zip(self._norms, parts, strict=True)]
        steps, keys, queries = self._steps(parts[0]), parts[1], parts[2]
        rows = ScanRows(values, steps, keys, queries)
        seen = selective_scan(rows, self._channels, step.pages, step.plan)
        return self._output(silu_mul(step.kept(gate), step.kept(seen)))
