"""When decode steps are recorded; tests/parity compares the results with computed ones."""

from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.engine.request import SamplingParams
from runtime.kernels.pointwise import rms_norm
from runtime.kernels.recording import NotRecordableError
from runtime.worker.model import AttentionPlan, Batch, KVCache, RowForm, RowSpan
from runtime.worker.recorded_steps import CallRecorder, RecordedSteps, StepOutput
from runtime.worker.sampler import Drawn, Draws, Sampler
from tests.kernels.native_kernels import require_native_kernels
from tests.unit.runtime.worker.loaded_slots import load_slots

CPU = torch.device("cpu")
ROWS = 4
PLACES = torch.arange(ROWS)
NOISE = torch.randn(ROWS + 1, 8, generator=torch.Generator().manual_seed(1))


class Model:
    """Counts what it computes; not recordable for `refused` rows."""

    position_axes = 1

    def __init__(self, refused: int | None) -> None:
        self.refused, self.computed = refused, 0

    def states(self, batch: Batch, cache: KVCache) -> Tensor:
        self.computed += 1
        states = rms_norm(NOISE[: len(batch.tokens)], None, 1e-5)
        return states + 1 if len(batch.tokens) == self.refused else states


def batch(rows: int) -> Batch:
    narrow, wide = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int64)
    spans = tuple(RowSpan(row, row + 1, row, 0) for row in range(rows))
    plan = AttentionPlan(narrow[None], narrow, narrow, narrow, wide, spans)
    return Batch(wide, wide, wide, (plan,))


class Steps:
    """Steps of a model; `refused_draws`: the numbers of rows whose draws are not recordable."""

    def __init__(
        self, model: Model, *, stateful: bool, refused_draws: Collection[int] = ()
    ) -> None:
        require_native_kernels()
        self.refused_draws, self.drawn = refused_draws, 0
        self.sampler = Sampler(slots=ROWS, context_tokens=9, vocab_size=8, device=CPU)
        sampling = [SamplingParams(temperature=0), *[SamplingParams(top_k=3, seed=5)] * (ROWS - 1)]
        load_slots(self.sampler, sampling)
        recorder = CallRecorder(ROWS, nbytes=1 << 12)
        self.recorded = RecordedSteps(model, None, recorder, stateful=stateful)  # type: ignore[arg-type]

    def __call__(
        self, rows: int, *, form: RowForm | None = RowForm.ONE_EACH, draws: bool = False
    ) -> StepOutput:
        assert form is None or self.recorded.rows(form, rows) == rows  # nothing is padded on a CPU
        made, inputs = batch(rows), SimpleNamespace(positions=range(rows), draws_alone=draws)
        inputs.form = form
        return self.recorded.prepared(inputs, lambda _: made, self.draw)()  # type: ignore[arg-type]

    def draw(self, inputs: Any, states: Tensor) -> Drawn:
        """The states are the logits."""
        self.drawn += 1
        rows = len(states)
        counts = 1, rows - 1, 0, 0, 0, 0
        draws = Draws(PLACES[:rows], PLACES[:rows], counts, width=3)
        return self.sampler.sample(states * 1 if rows in self.refused_draws else states, draws)


def test_a_recorded_number_of_rows_is_not_computed_again() -> None:
    step = Steps(model := Model(None), stateful=True)
    for rows in (1, 2, 1, 2, 2):
        assert step(rows).drawn is None
    assert model.computed == 2 and step.recorded.recorded_rows == {1, 2}


def test_other_steps_and_more_rows_than_sequences_are_computed() -> None:
    step = Steps(model := Model(None), stateful=True)
    for _ in range(2):
        step(2, form=None, draws=True)
        step(ROWS + 1)
    assert model.computed == 4 and not step.recorded.recorded_rows and not step.drawn


def test_draws_are_recorded_up_to_a_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.worker.recorded_steps.MOST_DRAWN_ROWS", 2)
    step = Steps(model := Model(None), stateful=True)
    expected = dict[int, list[int]]()
    for rows, draws in ((1, True), (2, True), (2, False), (1, True), (2, True), (3, True)):
        states, drawn = step(rows, draws=draws)
        assert (drawn is None) == (not draws or rows > 2)
        if drawn is not None:
            tokens = drawn.tokens.tolist()
            assert expected.setdefault(rows, tokens) == tokens
            assert tokens[0] == int(states[0].argmax())
            assert step.sampler.tokens_at(PLACES[:rows].int(), PLACES[:rows]).tolist() == tokens
    assert model.computed == 4 and step.drawn == 2


def test_tokens_stay_valid_while_later_steps_are_computed() -> None:
    step = Steps(Model(None), stateful=True)
    for _ in range(2):
        _, drawn = step(2, draws=True)
        assert drawn is not None
        before = drawn.tokens.tolist(), drawn.finite.tolist()
        for draws in (True, False):
            step(3, draws=draws)
        assert (drawn.tokens.tolist(), drawn.finite.tolist()) == before


@pytest.mark.parametrize("stateful", [False, True])
def test_draws_that_are_not_recordable_follow_recorded_states(stateful: bool) -> None:
    step = Steps(model := Model(None), stateful=stateful, refused_draws=range(ROWS + 1))
    step(2)
    for rows in (1, 2, 1):
        assert step(rows, draws=True).drawn is None
    assert step.recorded.recorded_rows == {1, 2} and step.drawn == 1
    assert model.computed == 3


@pytest.mark.parametrize("stateful", [False, True])
def test_a_model_whose_first_step_is_not_recordable_computes_its_steps(stateful: bool) -> None:
    step = Steps(model := Model(1), stateful=stateful)
    for rows in (1, 2, 1):
        assert len(step(rows).states) == rows
    assert model.computed == 4 and not step.recorded.recorded_rows


def test_one_number_of_rows_that_is_not_recordable_leaves_the_others() -> None:
    step = Steps(model := Model(2), stateful=False)
    for rows in (1, 2, 2, 3, 1, 3):
        assert len(step(rows, draws=rows != 1).states) == rows
    assert step.recorded.recorded_rows == {1, 3} and step.drawn == 1
    assert model.computed == 6  # with two rows first with draws, without them, and unrecorded


def test_draws_of_one_number_of_rows_that_are_not_recordable_leave_the_others() -> None:
    step = Steps(model := Model(None), stateful=False, refused_draws=[2])
    for rows in (1, 2, 3, 1, 2, 3):
        assert (step(rows, draws=True).drawn is None) == (rows == 2)
    assert step.recorded.recorded_rows == {1, 2, 3} and step.drawn == 3
    assert model.computed == 4


class LackingMemory:
    """Runs computations, but has no memory to record those of two rows."""

    most_rows, most_span_rows, drawn_rows = ROWS, ROWS, 0

    def __init__(self, recorder: CallRecorder) -> None:
        self._recorder = recorder

    def rows(self, form: RowForm, count: int) -> int | None:
        return count

    def record(self, computation: Callable[[], StepOutput]) -> tuple[Any, StepOutput]:
        recording, result = self._recorder.record(computation)
        if len(result.states) == 2:
            raise NotRecordableError("out of memory", result)
        return recording, result


@pytest.mark.parametrize("stateful", [True, False])
def test_a_step_that_was_computed_before_its_recording_failed_is_not_repeated(
    stateful: bool,
) -> None:
    step = Steps(model := Model(None), stateful=stateful)
    step.recorded._recorder = LackingMemory(CallRecorder(ROWS, nbytes=1 << 12))
    for rows, computed in ((1, 1), (2, 2), (2, 3), (1, 3), (3, 4)):
        assert torch.equal(step(rows).states, Model(None).states(batch(rows), None))
        assert model.computed == computed
    assert step.recorded.recorded_rows == {1, 3}


def test_a_later_step_is_computed_twice_only_if_there_are_no_states_of_sequences() -> None:
    step = Steps(model := Model(2), stateful=False)
    for rows in (1, 2, 1):
        assert len(step(rows).states) == rows
    assert model.computed == 3
    for drew in (False, True):
        step = Steps(model := Model(2), stateful=True)
        step(1, draws=drew)
        with pytest.raises(RuntimeError, match=r"rows=2.*cannot be recorded"):
            step(2)
        assert model.computed == 2


class SpanRecorder(CallRecorder):
    """Records steps of both forms, as on CUDA devices."""

    most_span_rows = ROWS

    def rows(self, form: RowForm, count: int) -> int | None:
        return count


def test_prompts_are_recorded_apart_from_decode_steps() -> None:
    step = Steps(model := Model(None), stateful=False)
    step.recorded._recorder = SpanRecorder(ROWS, nbytes=1 << 12)
    for form in (RowForm.ONE_EACH, RowForm.ONE_SPAN, RowForm.ONE_EACH, RowForm.ONE_SPAN):
        step(3, form=form)
    assert model.computed == 2 and step.recorded.recorded_rows == {3}


def test_prompts_are_not_recorded_with_states_of_sequences() -> None:
    step = Steps(Model(None), stateful=True)
    step.recorded._recorder = SpanRecorder(ROWS, nbytes=1 << 12)
    assert step.recorded.rows(RowForm.ONE_SPAN, 3) is None and not step.recorded.most_span_rows
    assert step.recorded.rows(RowForm.ONE_EACH, 3) == 3


def test_a_prompt_that_is_not_recordable_leaves_decode_steps() -> None:
    step = Steps(model := Model(3), stateful=False)
    step.recorded._recorder = SpanRecorder(ROWS, nbytes=1 << 12)
    assert len(step(3, form=RowForm.ONE_SPAN).states) == 3
    step(2)
    assert step.recorded.rows(RowForm.ONE_SPAN, 3) is None
    step(2)
    step(2, form=RowForm.ONE_SPAN)
    step(2, form=RowForm.ONE_SPAN)
    assert model.computed == 4 and step.recorded.recorded_rows == {2}
