"""Sequences with a grammar: the steps that they take part in, and the tokens their matchers get."""

import random

import pytest

from runtime.engine.request import (
    GenerationRequest,
    LateMask,
    Result,
    ResumeState,
    Sampled,
    StopRules,
)
from runtime.engine.step_plan import Chunk, StepPlan
from tests.unit.runtime.engine.fake_runner import PretendRunner, answer
from tests.unit.runtime.engine.test_engine import make_engine, run, whole
from tests.unit.runtime.engine.test_scheduler import request, results, scheduler_of, shape


class Recorded:
    """A grammar that records what its matchers accept. `free`: tokens that need no mask now."""

    def __init__(self, free: int = 0) -> None:
        self.accepted: list[int] = []
        self.matchers = 0
        self.free = free

    def matcher(self) -> "Recorded":
        self.matchers += 1
        return self

    def accept(self, token: int) -> None:
        self.accepted.append(token)
        self.free = max(0, self.free - 1)

    def allowed(self, mask: memoryview) -> None:
        raise AssertionError("the fake runner needs no masks")


def test_a_sequence_with_a_grammar_waits_for_its_token_and_others_do_not() -> None:
    scheduler = scheduler_of()
    scheduler.add(request("a", 3, grammar=Recorded()))
    scheduler.add(request("bb", 3))
    first, second, third = scheduler.plan(), scheduler.plan(), scheduler.plan()
    assert shape(first) == [("a", 0, 3, True), ("bb", 0, 3, True)]
    assert shape(second) == [("bb", 3, 1, True)]
    assert shape(third) == [("bb", 4, 1, True)]
    assert first is not None and second is not None
    list(scheduler.retire(first, results(first)))
    assert shape(scheduler.plan()) == [("a", 3, 1, True), ("bb", 5, 1, True)]
    list(scheduler.retire(second, results(second)))
    assert shape(scheduler.plan()) == [("bb", 6, 1, True)]


@pytest.mark.parametrize("free", [0, 1, 2, 3])
def test_it_waits_only_before_tokens_that_need_masks(free: int) -> None:
    scheduler = scheduler_of()
    scheduler.add(request("a", 3, grammar=Recorded(free)))
    plans = [scheduler.plan() for _ in range(5)]
    ahead = max(1, free)  # a mask is computed beside the step that samples its token
    assert [plan is not None for plan in plans] == [n < ahead for n in range(5)]
    assert plans[0] is not None
    list(scheduler.retire(plans[0], results(plans[0])))
    [sequence] = scheduler.running
    assert (scheduler.plan() is not None) == (free < 2)
    assert sequence.needs_masks == (free < 2)


def test_its_prompt_is_computed_in_consecutive_steps() -> None:
    scheduler = scheduler_of()
    scheduler.add(request("a", 20, grammar=Recorded()))
    assert shape(scheduler.plan()) == [("a", 0, 8, False)]
    assert shape(scheduler.plan()) == [("a", 8, 8, False)]
    assert shape(scheduler.plan()) == [("a", 16, 4, True)]
    assert scheduler.plan() is None


def test_a_resumed_answer_is_accepted_before_new_tokens() -> None:
    grammar = Recorded()
    resumed = GenerationRequest(
        "a", (5, 6, 7), StopRules(6), resume=ResumeState((1, 2)), grammar=grammar
    )
    scheduler = scheduler_of()
    scheduler.add(resumed)
    assert grammar.accepted == [1, 2]
    plan = scheduler.plan()
    assert plan is not None
    list(scheduler.retire(plan, results(plan)))
    assert grammar.accepted == [1, 2, 9]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_matchers_accept_each_token_once_whatever_is_preempted(depth: int) -> None:
    engine = make_engine(depth=depth, pages=24)
    grammars = [Recorded() if index % 2 else None for index in range(8)]
    requests = [
        GenerationRequest(
            str(index), tuple(range(index, 6 * index + 3)), StopRules(20 - index), grammar=grammar
        )
        for index, grammar in enumerate(grammars)
    ]
    boxes = run(engine, *requests)
    assert engine.statistics().preemptions_total > 0
    for each, box in zip(requests, boxes, strict=True):
        expected = answer(each.prompt, each.stop.max_tokens)
        assert list(whole(box).tokens) == expected
        if isinstance(each.grammar, Recorded):
            assert (each.grammar.accepted, each.grammar.matchers) == (expected, 1)


def test_a_late_mask_delays_its_own_sequence_only() -> None:
    scheduler, known = scheduler_of(), False
    scheduler.add(request("a", 3, grammar=Recorded()))
    scheduler.add(request("bb", 3))
    first = scheduler.plan()
    late = LateMask(lambda: known, None)
    assert first is not None
    assert [each.sequence.request.id for each in scheduler.retire(first, (late, Sampled(9)))] == [
        "bb"
    ]
    for start in (3, 4):
        plan = scheduler.plan()
        assert shape(plan) == [("bb", start, 1, True)]
        list(scheduler.retire(plan, results(plan)))
    known = True
    plan = scheduler.plan()
    assert shape(plan) == [("a", 2, 1, True), ("bb", 5, 1, True)]
    assert plan.chunks[0].sequence.late_mask is late
    list(scheduler.retire(plan, results(plan)))
    plan = scheduler.plan()
    assert shape(plan) == [("a", 3, 1, True), ("bb", 6, 1, True)]
    assert plan.chunks[0].sequence.late_mask is None


def test_a_step_without_other_sequences_waits_for_late_masks() -> None:
    scheduler = scheduler_of()
    scheduler.add(request("a", 3, grammar=Recorded()))
    scheduler.add(request("bb", 3, grammar=Recorded()))
    first, late = scheduler.plan(), LateMask(lambda: False, None)
    list(scheduler.retire(first, (late, late)))
    second = scheduler.plan()
    assert shape(second) == [("a", 2, 1, True), ("bb", 2, 1, True)]
    assert scheduler.plan() is None
    list(scheduler.retire(second, (Sampled(9), late)))
    third = scheduler.plan()
    assert shape(third) == [("a", 3, 1, True)]
    assert scheduler.plan() is None  # until the step in flight retires
    list(scheduler.retire(third, results(third)))
    assert shape(scheduler.plan()) == [("a", 4, 1, True)]


class SometimesLate(PretendRunner):
    """Masks are late for up to three steps."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(5)
        self.late = 0

    def collect(self, launched: StepPlan) -> tuple[Result, ...]:
        collected = super().collect(launched)
        pairs = zip(launched.chunks, collected, strict=True)
        return tuple(self.maybe_late(chunk, result) for chunk, result in pairs)

    def maybe_late(self, chunk: Chunk, result: Result) -> Result:
        known = chunk.sequence.late_mask
        if result is None or chunk.sequence.matcher is None or known is not None:
            return result
        if self.random.random() < 0.7:
            return result
        self.late += 1
        del self.slots[chunk.slot][chunk.start + chunk.length :]
        until = self.steps + self.random.randrange(4)
        return LateMask(lambda: self.steps >= until, None)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_late_masks_change_no_answer_whatever_is_preempted(depth: int) -> None:
    runner = SometimesLate()
    engine = make_engine(depth=depth, pages=24, runner=runner)
    requests = [
        GenerationRequest(
            str(index),
            tuple(range(index, 6 * index + 3)),
            StopRules(20 - index),
            grammar=Recorded() if index % 4 else None,
        )
        for index in range(8)
    ]
    boxes = run(engine, *requests)
    assert engine.statistics().preemptions_total > 0 and runner.late > 10
    for each, box in zip(requests, boxes, strict=True):
        assert list(whole(box).tokens) == answer(each.prompt, each.stop.max_tokens)
