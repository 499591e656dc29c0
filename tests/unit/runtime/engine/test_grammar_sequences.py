"""Sequences with a grammar: which steps they take part in, and what their matchers see."""

import pytest

from runtime.engine.request import GenerationRequest, ResumeState, StopRules
from tests.unit.runtime.engine.fake_runner import answer
from tests.unit.runtime.engine.test_engine import make_engine, run, whole
from tests.unit.runtime.engine.test_scheduler import request, results, scheduler_of, shape


class Recorded:
    """A grammar that records what its matchers accept."""

    def __init__(self) -> None:
        self.accepted: list[int] = []
        self.matchers = 0

    def matcher(self) -> "Recorded":
        self.matchers += 1
        return self

    def accept(self, token: int) -> None:
        self.accepted.append(token)

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
    scheduler.retire(first, results(first))
    assert shape(scheduler.plan()) == [("a", 3, 1, True), ("bb", 5, 1, True)]
    scheduler.retire(second, results(second))
    assert shape(scheduler.plan()) == [("bb", 6, 1, True)]


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
    scheduler.retire(plan, results(plan))
    assert grammar.accepted == [1, 2, 9]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_matchers_accept_each_token_once_whatever_is_preempted(depth: int) -> None:
    engine, cache_manager = make_engine(depth=depth, pages=24)
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
    cache_manager.check_idle()
