"""Steps on a CUDA device as CUDA graphs: the host starts all kernels of a step at once.

The inputs of a step are uploaded to fixed addresses. One copy of them on the device is enough for
any number of steps in flight: uploads and graphs are on one stream, so the next upload begins when
the previous graph has read its inputs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from runtime.kernels.recording import NotRecordableError, OperationMode, Result
from runtime.worker.input_preparer import StepLimits
from runtime.worker.model import ModelSizes, RowForm

# With more rows, kernels take longer than the host needs to start them.
MOST_ROWS, MOST_SPAN_ROWS = 256, 512
# Sizes are multiples of this number of rows; smaller ones are powers of two. A prompt of few rows
# takes as long as one of twice as many, since both read all weights.
_STEP, _SPAN_STEP, _LEAST_SPAN = 8, 64, 16
# Estimated memory that the driver holds for a graph of some 500 kernels; and the workspace that
# torch gives cuBLAS on the stream of captures.
_DRIVER_BYTES, _LIBRARY_BYTES = 4 << 20, 32 << 20


def padded_rows(count: int, most: int) -> int | None:
    """The rows of the graph for `count` rows of at most `most`; None if there is none."""
    most = min(most, MOST_ROWS)
    if count > most:
        return None
    power, multiple = 1 << (count - 1).bit_length(), -(-count // _STEP) * _STEP
    return min(most, power if count <= _STEP else multiple)


def graph_sizes(most: int) -> tuple[int, ...]:
    """The numbers of rows of all graphs."""
    counts = range(1, min(most, MOST_ROWS) + 1)
    return tuple(sorted({rows for count in counts if (rows := padded_rows(count, most))}))


def padded_span(count: int, most: int) -> int | None:
    """The rows of the graph for `count` rows of a prompt, in steps of at most `most`; None if there
    is none. With padding there are several rows of it, see `RowForm`."""
    fitting = (size for size in span_sizes(most) if size == count or size > count + 1)
    return next(fitting, None)


def span_sizes(most: int) -> tuple[int, ...]:
    """The numbers of rows of all graphs of prompts."""
    most = min(most, MOST_SPAN_ROWS)
    powers = (_LEAST_SPAN << power for power in range((_SPAN_STEP // _LEAST_SPAN).bit_length()))
    sizes = {*powers, *range(_SPAN_STEP, most, _SPAN_STEP)}
    return (*sorted(size for size in sizes if size < most), *([most] if most > 1 else []))


def graph_bytes(model: ModelSizes, limits: StepLimits) -> int:
    """Bytes of all graphs: one pool for their activations, since they run one after the other;
    their results, at most in float32; and allocations of driver and libraries."""
    sizes, spans = graph_sizes(limits.draws), span_sizes(limits.step_tokens)
    activations = (model.activation_bytes(rows, 0) for rows in (*sizes[-1:], *spans[-1:]))
    return (
        max(activations)
        + 4 * model.hidden_size * (sum(sizes) + len(spans))
        + (len(sizes) + len(spans)) * _DRIVER_BYTES
        + _LIBRARY_BYTES
    )


class GraphRecorder:
    """Captures computations of one device; see `StepRecorder`."""

    def __init__(self, limits: StepLimits, device: torch.device) -> None:
        self.most_rows = min(limits.draws, MOST_ROWS)
        self.most_span_rows = min(limits.step_tokens, MOST_SPAN_ROWS)
        self._pool = torch.cuda.graph_pool_handle()
        # torch hands out 32 streams of each priority in turn. One that the encoder of another model
        # has would capture its kernels. Those of graphs then precede kernels of encoders.
        self._stream = torch.cuda.Stream(device, priority=-1)

    @property
    def drawn_rows(self) -> int:
        """0: logits are in float32, and the memory of each graph's results stays reserved."""
        return 0

    def rows(self, form: RowForm, count: int) -> int | None:
        if form is RowForm.ONE_EACH:
            return padded_rows(count, self.most_rows)
        return padded_span(count, self.most_span_rows)

    def record(self, computation: Callable[[], Result]) -> tuple["StepGraph[Result]", Result]:
        result = computation()  # compiles and loads kernels, which is not possible in a capture
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream), self._capturing(graph), _NoHostTensors():
                captured = computation()
        except NotRecordableError as error:
            raise NotRecordableError(str(error), result) from error
        except RuntimeError as error:  # lack of memory, too
            raise NotRecordableError(f"it cannot be captured: {error}", result) from error
        return StepGraph(graph, captured), result

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """As `torch.cuda.graph`, but does not synchronise the device, and other threads, which
        encode images, may use it during the capture."""
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


class StepGraph(Generic[Result]):
    """A graph and its result, whose memory in the pool stays reserved."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: Result) -> None:
        self._graph, self._result = graph, result

    def replay(self) -> Result:
        self._graph.replay()
        return self._result


class _NoHostTensors(OperationMode):
    """Refuses operations on host tensors: a graph would read them on each replay, after they may
    have changed. Tensors without dimensions are allowed; their numbers become part of the graph."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.dim():
                raise NotRecordableError(f"it uses the torch operation {func} with host memory")
        return func(*args, **(kwargs or {}))
