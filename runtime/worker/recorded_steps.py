"""Steps that are recorded once for each number of rows and then repeated by one call: decode steps
as calls of native kernels on a CPU, with head and draws if possible, and decode steps and short
prompts as CUDA graphs (`step_graphs`) on a GPU."""

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

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
from runtime.kv.cache_layout import CacheLayout
from runtime.worker import step_graphs
from runtime.worker.input_preparer import DeviceInputs, StepLimits
from runtime.worker.model import Batch, DecoderModel, KVCache, ModelSizes, RowForm
from runtime.worker.sampler import Drawn

# With more rows, a step takes so long that recording it gains little.
MOST_ROWS = 64
# With more rows, logits take much memory, which recordings reserve.
MOST_DRAWN_ROWS = 16

_log = logging.getLogger(__name__)


class StepOutput(NamedTuple):
    """The states of the output rows of a step, and the tokens that they draw; None if these are
    still to be drawn."""

    states: Tensor
    drawn: Drawn | None


class StepRecording(Protocol):
    """A recorded computation with inputs and results at fixed addresses."""

    def replay(self) -> StepOutput: ...


class StepRecorder(Protocol):
    """How computations are recorded on a device.

    `rows(form, count)`: the number of rows of a recorded step of that form with `count` rows,
    `count` or more with padding; None if such steps are not recorded, as those of more than
    `most_rows`, or in ONE_SPAN of more than `most_span_rows`. `drawn_rows`: the largest number of
    rows whose draws are recorded too, in ONE_EACH. `record(computation)` runs the computation and
    returns its recording and its result; raises NotRecordableError, with the result if all of it
    has run, possibly after a part of it.
    """

    @property
    def most_rows(self) -> int: ...

    @property
    def most_span_rows(self) -> int: ...

    @property
    def drawn_rows(self) -> int: ...

    def rows(self, form: RowForm, count: int) -> int | None: ...

    def record(self, computation: Callable[[], StepOutput]) -> tuple[StepRecording, StepOutput]: ...


class _Key(NamedTuple):
    """What the kernel calls of a step depend on: the number of its rows, whether they draw, and
    their form."""

    rows: int
    draws: bool
    form: RowForm = RowForm.ONE_EACH


class RecordedSteps:
    """Computes steps; records those of a form, whose inputs are at fixed addresses. What follows
    from the inputs, such as the cells of rows, is computed inside the recording; so are draws that
    depend on logits alone, if the recorder allows it.

    Recordings are made when a number of rows first occurs, so that only numbers in use take time
    and memory. What is not recordable is logged once and computed in every step: steps, or draws,
    with that number of rows, or all if none is recorded yet. With recurrent states (`stateful`) a
    step must not be computed twice, so recording may fail without a result only until a step is
    recorded with its draws or, if these are not, without them, which is part of the warm-up; steps
    of ONE_SPAN, which is not, are not recorded.
    """

    def __init__(
        self, model: DecoderModel, cache: KVCache, recorder: StepRecorder, *, stateful: bool
    ) -> None:
        self._model, self._cache = model, cache
        self._recorder, self._stateful = recorder, stateful
        self._recordings: dict[_Key, StepRecording] = {}
        self._recordable, self._drawn_rows = True, recorder.drawn_rows
        self._refused: set[_Key] = set()  # what is not recordable, besides such steps or draws

    @property
    def recorded_rows(self) -> frozenset[int]:
        """The numbers of rows of which a decode step is recorded."""
        return frozenset(key.rows for key in self._recordings if key.form is RowForm.ONE_EACH)

    @property
    def most_rows(self) -> int:
        """The largest number of rows of which a decode step may be recorded."""
        return self._recorder.most_rows

    @property
    def most_span_rows(self) -> int:
        """The largest number of rows of which a step of ONE_SPAN may be recorded."""
        return 0 if self._stateful else self._recorder.most_span_rows

    def rows(self, form: RowForm, count: int) -> int | None:
        """The number of rows of a step of that form with `count` rows, padding included; None if a
        step of ONE_SPAN is not recorded."""
        span = form is RowForm.ONE_SPAN
        unrecorded = not self._recordable or (span and self._stateful)
        rows = None if unrecorded else self._recorder.rows(form, count)
        if rows is None or _Key(rows, False, form) in self._refused:
            return None if span else count
        return rows

    def prepared(
        self,
        inputs: DeviceInputs,
        make: Callable[[DeviceInputs], Batch],
        draw: Callable[[DeviceInputs, Tensor], Drawn],
    ) -> Callable[[], StepOutput]:
        """A function that computes `DecoderModel.states` of the batch `make(inputs)` and perhaps
        `draw(inputs, states)`. The states are valid until the next step is computed."""
        rows, batch = len(inputs.positions), partial(make, inputs)
        steps = None if inputs.form is None else _Key(rows, False, inputs.form)
        if steps is None or not self._records(steps):
            made = batch()
            return lambda: StepOutput(self._model.states(made, self._cache), None)
        draws = inputs.draws_alone and rows <= self._drawn_rows
        drawing = steps._replace(draws=True)
        key = drawing if draws and drawing not in self._refused else steps
        return partial(self._repeated, key, batch, partial(draw, inputs))

    def _records(self, steps: _Key) -> bool:
        """Whether steps with this number of rows, padding included, are recorded."""
        recordable = self._recordable and steps not in self._refused
        return recordable and self._recorder.rows(steps.form, steps.rows) == steps.rows

    def _repeated(
        self, key: _Key, batch: Callable[[], Batch], draw: Callable[[Tensor], Drawn]
    ) -> StepOutput:
        def computation() -> StepOutput:
            states = self._model.states(_without_spans(batch(), key.form), self._cache)
            return StepOutput(states, draw(states) if key.draws else None)

        found = self._recordings.get(key)
        if found is not None:
            return _with_own_tokens(found.replay())
        try:
            self._recordings[key], output = self._recorder.record(computation)
        except NotRecordableError as error:
            if isinstance(error.result, StepOutput) and not key.draws:
                self._refuse_steps(key, error)
                return error.result
            if self._stateful and any(other.draws or not key.draws for other in self._recordings):
                raise RuntimeError(f"{key} cannot be recorded: {error}") from error
            if not key.draws:
                self._refuse_steps(key, error)
                return StepOutput(self._model.states(batch(), self._cache), None)
            steps = key._replace(draws=False)
            output = self._repeated(steps, batch, draw)
            if steps in self._recordings:
                self._refuse_draws(key, error)
            return output
        return _with_own_tokens(output)

    def _refuse_steps(self, key: _Key, error: NotRecordableError) -> None:
        """If steps with other numbers of rows are recorded, the cause is this number, such as the
        memory that it needs. The failure of a prompt implies nothing about decode steps."""
        if self._recordings or key.form is RowForm.ONE_SPAN:
            self._refused.add(key)
        else:
            self._recordable = False
        _log.info(
            "Steps with %s are not recorded for %s rows, because of their computation: %s.",
            key.form.value,
            key.rows if self._recordable else "any",
            error,
        )

    def _refuse_draws(self, key: _Key, error: NotRecordableError) -> None:
        if any(other.draws for other in self._recordings):
            self._refused.add(key)
        else:
            self._drawn_rows = 0
        _log.info(
            "Draws are not recorded for %s rows, because of their computation: %s.",
            key.rows if self._drawn_rows else "any",
            error,
        )


def _with_own_tokens(output: StepOutput) -> StepOutput:
    """The output with tokens that stay valid while later steps are computed."""
    drawn = output.drawn
    if drawn is None:
        return output
    return output._replace(drawn=Drawn(drawn.tokens.clone(), drawn.finite.clone()))


def recorded_bytes(
    model: ModelSizes,
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
        return step_graphs.graph_bytes(model, limits) if cuda_graphs else 0
    if device.type != "cpu" or library() is None:
        return 0
    rows, drawn = min(limits.draws, MOST_ROWS), min(limits.draws, MOST_DRAWN_ROWS)
    activations = max(model.activation_bytes(rows, 0), model.activation_bytes(drawn, drawn))
    return activations + aligned_bytes(8 * rows) * (3 + len(layout.groups))


def recorder_of(limits: StepLimits, device: torch.device, *, nbytes: int) -> StepRecorder:
    """The recorder for a device. `nbytes`: the result of `recorded_bytes`."""
    if device.type == "cuda":
        return step_graphs.GraphRecorder(limits, device)
    return CallRecorder(limits.draws, nbytes)


class CallRecorder:
    """Records calls of native kernels on a CPU."""

    most_span_rows = 0

    def __init__(self, rows: int, nbytes: int) -> None:
        self.most_rows = min(rows, MOST_ROWS)
        self._arena = Arena(nbytes)

    def rows(self, form: RowForm, count: int) -> int | None:
        return count if form is RowForm.ONE_EACH and count <= self.most_rows else None

    @property
    def drawn_rows(self) -> int:
        return min(self.most_rows, MOST_DRAWN_ROWS)

    def record(self, computation: Callable[[], StepOutput]) -> tuple[StepRecording, StepOutput]:
        kernels = library()
        assert kernels is not None, "`recorded_bytes` is 0 without kernels"
        recording = record(computation, self._arena)
        return _RecordedCalls(recording, kernels), recording.result


@dataclass(frozen=True, slots=True)
class _RecordedCalls:
    recording: Recording[StepOutput]
    kernels: ctypes.CDLL

    def replay(self) -> StepOutput:
        return self.recording.replay(self.kernels)


class _HostOnly(tuple[Any, ...]):
    """Row spans that differ between steps, so that a recorded computation must not read them."""

    def __iter__(self) -> NoReturn:
        raise NotRecordableError("it reads the spans of rows")

    __len__ = __getitem__ = __iter__  # type: ignore[assignment]


def _without_spans(batch: Batch, form: RowForm) -> Batch:
    plans = (replace(plan, spans=_HostOnly(), form=form) for plan in batch.plans)
    return replace(batch, plans=tuple(plans))
