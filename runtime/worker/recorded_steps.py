"""Decode steps that are recorded once for each number of rows and then repeated by one call: as
calls of native kernels on a CPU, as CUDA graphs (`step_graphs`) on a GPU."""

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from runtime.kernels.native import library
from runtime.kernels.recording import (
    Arena,
    NotRecordableError,
    Recording,
    aligned_bytes,
    record,
)
from runtime.kv.spec import CacheLayout
from runtime.worker import step_graphs
from runtime.worker.input_preparer import DeviceInputs, StepLimits
from runtime.worker.model import Batch, DecoderModel, KVCache

# With more rows, a step takes so long that recording it gains little.
MOST_ROWS = 64

_log = logging.getLogger(__name__)


class StepRecording(Protocol):
    """A recorded computation with inputs and a result at fixed addresses."""

    def replay(self) -> Tensor: ...


class StepRecorder(Protocol):
    """How computations are recorded on a device.

    `rows(count)`: the number of rows of a recorded step with `count` spans, `count` or more with
    padding; None if such steps are not recorded. `record(computation)` runs the computation and
    returns its recording and its result; raises NotRecordableError, possibly after a part of it
    has run.
    """

    def rows(self, count: int) -> int | None: ...

    def record(self, computation: Callable[[], Tensor]) -> tuple[StepRecording, Tensor]: ...


class RecordedSteps:
    """Computes the hidden states of steps; records those with one row and one output per span,
    whose inputs are at fixed addresses. What follows from the inputs, such as the cells of rows, is
    computed inside the recording.

    Recordings are made when a number of rows first occurs, so that only numbers in use take time
    and memory. If a model is not recordable, this is logged once and every step is computed. With
    recurrent states (`stateful`) a step must not be computed twice, so recording may fail only in
    the first step, which is part of the warm-up.
    """

    def __init__(
        self, model: DecoderModel, cache: KVCache, recorder: StepRecorder, *, stateful: bool
    ) -> None:
        self._model, self._cache = model, cache
        self._recorder, self._stateful = recorder, stateful
        self._recordings: dict[int, StepRecording] = {}
        self._recordable = True

    @property
    def recordings(self) -> dict[int, StepRecording]:
        """Recordings by number of rows."""
        return self._recordings

    def rows(self, count: int) -> int:
        """The number of rows of a step with `count` spans, padding included."""
        return (self._recorder.rows(count) if self._recordable else None) or count

    def prepared(
        self, inputs: DeviceInputs, make: Callable[[DeviceInputs], Batch]
    ) -> Callable[[], Tensor]:
        """A function that computes `DecoderModel.states` of the batch `make(inputs)`. The states
        are valid until the next step is computed."""
        rows, of_inputs = len(inputs.positions), partial(make, inputs)
        recorded = self._recordable and inputs.one_row_each
        if not recorded or self._recorder.rows(rows) != rows:
            return partial(self._model.states, of_inputs(), self._cache)
        return partial(self._states, rows, of_inputs)

    def _states(self, rows: int, of_inputs: Callable[[], Batch]) -> Tensor:
        found = self._recordings.get(rows)
        if found is not None:
            return found.replay()
        try:
            recording, result = self._recorder.record(
                lambda: self._model.states(_without_spans(of_inputs()), self._cache)
            )
        except NotRecordableError as error:
            if self._stateful and self._recordings:
                raise RuntimeError(f"A step of {rows} rows cannot be recorded: {error}") from error
            _log.info("Decode steps are not recorded, because of their computation: %s.", error)
            self._recordable = False
            return self._model.states(of_inputs(), self._cache)
        self._recordings[rows] = recording
        return result


def recorded_bytes(
    model: step_graphs.RecordedModel,
    layout: CacheLayout,
    limits: StepLimits,
    device: torch.device,
    *,
    cuda_graphs: bool,
) -> int:
    """Bytes of memory for `RecordedSteps`. 0 if steps of the model are not recorded, because images
    make every step different."""
    if any(kind.by_image for kind in layout.kinds):
        return 0
    if device.type == "cuda":
        return step_graphs.graph_bytes(model, limits.draws) if cuda_graphs else 0
    if device.type != "cpu" or library() is None:
        return 0
    rows = min(limits.draws, MOST_ROWS)
    return model.activation_bytes(rows, 0) + aligned_bytes(8 * rows) * (1 + len(layout.groups))


def recorder_of(limits: StepLimits, device: torch.device, *, nbytes: int) -> StepRecorder:
    """The recorder for a device. `nbytes`: the result of `recorded_bytes`."""
    if device.type == "cuda":
        return step_graphs.GraphRecorder(limits.draws, device)
    return CallRecorder(limits.draws, nbytes)


class CallRecorder:
    """Records calls of native kernels on a CPU."""

    def __init__(self, rows: int, nbytes: int) -> None:
        self._most = min(rows, MOST_ROWS)
        self._arena = Arena(nbytes)

    def rows(self, count: int) -> int | None:
        return count if count <= self._most else None

    def record(self, computation: Callable[[], Tensor]) -> tuple[StepRecording, Tensor]:
        kernels = library()
        assert kernels is not None, "`recorded_bytes` is 0 without kernels"
        recording = record(computation, self._arena)
        return _RecordedCalls(recording, kernels), recording.result


@dataclass(frozen=True, slots=True)
class _RecordedCalls:
    recording: Recording
    kernels: ctypes.CDLL

    def replay(self) -> Tensor:
        return self.recording.replay(self.kernels)


class _HostOnly(tuple[Any, ...]):
    """Row spans that differ between steps, so that a recorded computation must not read them."""

    def __iter__(self) -> NoReturn:
        raise NotRecordableError("it reads the spans of rows")

    __len__ = __getitem__ = __iter__  # type: ignore[assignment]


def _without_spans(batch: Batch) -> Batch:
    plans = (replace(plan, spans=_HostOnly(), one_row_each=True) for plan in batch.plans)
    return replace(batch, plans=tuple(plans))
