"""When decode steps are recorded; tests/parity compares the results with computed ones."""

import pytest
import torch
from torch import Tensor

from runtime.kernels.pointwise import rms_norm
from runtime.worker.model import AttentionPlan, Batch, KVCache, RowSpan
from runtime.worker.recorded_steps import RecordedSteps
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


def steps(model: Model, *, stateful: bool) -> RecordedSteps:
    require_native_kernels()
    return RecordedSteps(model, None, groups=1, rows=4, nbytes=1 << 12, stateful=stateful)  # type: ignore[arg-type]


def test_a_recorded_number_of_rows_is_not_computed_again() -> None:
    recorded = steps(model := Model(None), stateful=True)
    for rows in (1, 2, 1, 2, 2):
        recorded.states(batch(rows))
    assert model.computed == 2 and set(recorded.recordings) == {1, 2}


@pytest.mark.parametrize("stateful", [False, True])
def test_a_model_whose_first_step_is_not_recordable_computes_its_steps(stateful: bool) -> None:
    recorded = steps(model := Model(1), stateful=stateful)
    for rows in (1, 2, 1):
        assert len(recorded.states(batch(rows))) == rows
    assert model.computed == 4 and not recorded.recordings


def test_a_later_step_is_computed_twice_only_if_there_are_no_states_of_sequences() -> None:
    recorded = steps(model := Model(2), stateful=False)
    for rows in (1, 2, 1):
        assert len(recorded.states(batch(rows))) == rows
    assert model.computed == 4
    recorded = steps(model := Model(2), stateful=True)
    recorded.states(batch(1))
    with pytest.raises(RuntimeError, match="2 rows cannot be recorded"):
        recorded.states(batch(2))
    assert model.computed == 2
