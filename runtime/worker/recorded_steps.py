"""Decode steps on a CPU, whose kernel calls are recorded once for each number of rows."""

import logging
from dataclasses import replace
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from runtime.kernels.native import library
from runtime.kernels.recording import Arena, NotRecordableError, Recording, record
from runtime.kv.spec import CacheLayout
from runtime.worker.input_preparer import StepLimits
from runtime.worker.model import AttentionPlan, Batch, DecoderModel, KVCache

# With more rows, a step takes so long that recording it gains little.
MOST_ROWS = 64

_log = logging.getLogger(__name__)


class RecordedSteps:
    """The states of steps with one row per span and one output per row.

    The first step of a number of rows is recorded; later ones copy their inputs to the recorded
    addresses and repeat the calls. If a model is not recordable, which is logged once, it computes
    every step itself. With states of sequences (`stateful`), a step must not be computed twice, so
    that only the first, which is one of the warm-up, may turn out not to be recordable.
    """

    def __init__(
        self,
        model: DecoderModel,
        cache: KVCache,
        *,
        groups: int,
        rows: int,
        nbytes: int,
        stateful: bool,
    ) -> None:
        self._model, self._cache = model, cache
        self._inputs = _Inputs(min(rows, MOST_ROWS), groups, model.position_axes)
        self._arena, self._stateful = Arena(nbytes), stateful
        self._recordings: dict[int, Recording] = {}
        self._recordable = True

    @property
    def recordings(self) -> dict[int, Recording]:
        """By number of rows."""
        return self._recordings

    def states(self, batch: Batch) -> Tensor:
        """As `DecoderModel.states`; valid until the next call."""
        rows, kernels = len(batch.tokens), library()
        if not self._recordable or kernels is None or not _is_decoding(batch):
            return self._model.states(batch, self._cache)
        fixed = self._inputs.copied(batch)
        found = self._recordings.get(rows)
        if found is not None:
            return found.replay(kernels)
        try:
            recording = record(lambda: self._model.states(fixed, self._cache), self._arena)
        except NotRecordableError as error:
            if self._stateful and self._recordings:
                raise RuntimeError(f"A step of {rows} rows cannot be recorded: {error}") from error
            _log.info("Decode steps are not recorded, because of their computation: %s.", error)
            self._recordable = False
            return self._model.states(batch, self._cache)
        self._recordings[rows] = recording
        return recording.result


class RecordedModel(Protocol):
    """What `recorded_bytes` needs to know of a model; see `DecoderModel`."""

    def activation_bytes(self, tokens: int, outputs: int) -> int: ...


def recorded_bytes(
    model: RecordedModel, layout: CacheLayout, limits: StepLimits, device: torch.device
) -> int:
    """What the computation of `RecordedSteps` needs; 0 if steps of the model are not recorded,
    since images make every step different."""
    varies = any(kind.by_image for kind in layout.kinds)
    if device.type != "cpu" or varies or library() is None:
        return 0
    return model.activation_bytes(min(limits.draws, MOST_ROWS), 0)


def _is_decoding(batch: Batch) -> bool:
    rows = len(batch.tokens)
    return (
        rows <= MOST_ROWS
        and rows == len(batch.output_rows)
        and all(len(plan.spans) == rows for plan in batch.plans)
        and batch.image_rows is None
        and not batch.cross_features
    )


class _HostOnly(tuple[Any, ...]):
    """Row spans that differ between steps, so that a recorded computation must not read them."""

    def __iter__(self) -> NoReturn:
        raise NotRecordableError("it reads the spans of rows")

    __len__ = __getitem__ = __iter__  # type: ignore[assignment]


class _Inputs:
    """The inputs of steps at fixed addresses."""

    def __init__(self, rows: int, groups: int, axes: int) -> None:
        self._wide = torch.zeros(3 + groups, rows, dtype=torch.int64)
        self._narrow = torch.zeros(1 + 2 * groups, rows, dtype=torch.int32)
        self._axes = torch.zeros(axes * rows, dtype=torch.int64)

    def copied(self, batch: Batch) -> Batch:
        """The batch with the tensors of this object, which have its values."""
        rows = len(batch.tokens)
        tokens, positions, outputs, *cells = self._wide[:, :rows].unbind()
        slots, *seen = self._narrow[:, :rows].unbind()
        slots.copy_(batch.plans[0].row_slot)
        plans = tuple(
            _plan_copied(plan, slots, seen[2 * group], seen[2 * group + 1], cells[group])
            for group, plan in enumerate(batch.plans)
        )
        axes = None
        if batch.axes is not None:
            axes = self._axes[: batch.axes.numel()].view_as(batch.axes).copy_(batch.axes)
        return Batch(
            tokens.copy_(batch.tokens),
            positions.copy_(batch.positions),
            outputs.copy_(batch.output_rows),
            plans,
            axes=axes,
        )


def _plan_copied(
    plan: AttentionPlan, slots: Tensor, begin: Tensor, end: Tensor, cells: Tensor
) -> AttentionPlan:
    return replace(
        plan,
        row_slot=slots,
        visible_begin=begin.copy_(plan.visible_begin),
        visible_end=end.copy_(plan.visible_end),
        write_cell=cells.copy_(plan.write_cell),
        spans=_HostOnly(),
        one_row_each=True,
    )
