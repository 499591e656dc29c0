"""When decode steps are recorded; tests/parity compares the results with computed ones."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from runtime.kernels.pointwise import rms_norm
from runtime.worker.model import AttentionPlan, Batch, KVCache, RowSpan
from runtime.worker.recorded_steps import CallRecorder, RecordedSteps
from tests.kernels.native_kernels import require_native_kernels


class Model:
    """Counts what it computes; not recordable for `refused` rows."""

    position_axes = 1

    def __init__(self, refused: int | None) -> None:
        self.refused, self.computed = refused, 0

    def states(self, batch: Batch, cache: KVCache) -> Tensor:
        self.computed += 1
        states = rms_norm(torch.empty(len(batch.tokens), 8), None, 1e-5)
        return states + 1 if len(batch.tokens) == self.refused else states


def batch(rows: int) -> Batch:
    narrow, wide = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int64)
    spans = tuple(RowSpan(row, row + 1, row, 0) for row in range(rows))
    plan = AttentionPlan(narrow[None], narrow, narrow, narrow, wide, spans)
    return Batch(wide, wide, wide, (plan,))


def steps(model: Model, *, stateful: bool) -> Callable[[int], Tensor]:
    """The states of a step with so many rows."""
    require_native_kernels()
    recorder = CallRecorder(4, nbytes=1 << 12)
    recorded = RecordedSteps(model, None, recorder, stateful=stateful)  # type: ignore[arg-type]

    def step(rows: int, *, one_row_each: bool = True) -> Tensor:
        assert recorded.rows(rows) == rows  # nothing is padded on a CPU
        inputs, made = (
            SimpleNamespace(positions=range(rows), one_row_each=one_row_each),
            batch(rows),
        )
        return recorded.prepared(inputs, lambda _: made)()  # type: ignore[arg-type]

    step.recordings = recorded.recordings  # type: ignore[attr-defined]
    return step


def test_a_recorded_number_of_rows_is_not_computed_again() -> None:
    recorded = steps(model := Model(None), stateful=True)
    for rows in (1, 2, 1, 2, 2):
        recorded(rows)
    assert model.computed == 2 and set(recorded.recordings) == {1, 2}


def test_other_steps_and_more_rows_than_sequences_are_computed() -> None:
    recorded = steps(model := Model(None), stateful=True)
    for _ in range(2):
        recorded(2, one_row_each=False)
        recorded(5)
    assert model.computed == 4 and not recorded.recordings


@pytest.mark.parametrize("stateful", [False, True])
def test_a_model_whose_first_step_is_not_recordable_computes_its_steps(stateful: bool) -> None:
    recorded = steps(model := Model(1), stateful=stateful)
    for rows in (1, 2, 1):
        assert len(recorded(rows)) == rows
    assert model.computed == 4 and not recorded.recordings


def test_a_later_step_is_computed_twice_only_if_there_are_no_states_of_sequences() -> None:
    recorded = steps(model := Model(2), stateful=False)
    for rows in (1, 2, 1):
        assert len(recorded(rows)) == rows
    assert model.computed == 4
    recorded = steps(model := Model(2), stateful=True)
    recorded(1)
    with pytest.raises(RuntimeError, match="2 rows cannot be recorded"):
        recorded(2)
    assert model.computed == 2
