"""A trace has the computation of traced requests, and nothing of other requests."""

from dataclasses import replace
from random import Random

import pytest

from runtime.engine.engine import Engine
from runtime.engine.request import FinishReason, ImageSpan, ResumeState
from runtime.engine.scheduler import Scheduler
from runtime.engine.sequence import Sequence
from runtime.engine.tracing import TraceEvent, Tracer
from runtime.kv.cache_kinds import Full
from runtime.kv.cache_manager import KVCacheManager
from tests.unit.runtime.engine.fake_runner import PretendRunner, answer
from tests.unit.runtime.engine.random_proposals import RandomProposals
from tests.unit.runtime.engine.test_engine import LIMITS, request, run, token_bytes, whole


class Events:
    """Keeps the events by request."""

    def __init__(self, *, every: bool = False) -> None:
        self.every = every
        self.of: dict[str, list[TraceEvent]] = {}

    def write(self, event: TraceEvent) -> None:
        self.of.setdefault(event.request, []).append(event)


def make_engine(events: Events, *, depth: int = 2, pages: int = 40) -> Engine:
    scheduler = Scheduler(KVCacheManager([Full()], [pages], page_tokens=4), slots=4, step_tokens=16)
    return Engine(
        scheduler,
        PretendRunner(),
        token_bytes=token_bytes,
        limits=LIMITS,
        depth=depth,
        trace_sink=events,
    )


def kinds(events: list[TraceEvent]) -> list[str]:
    return [event.kind for event in events]


def covered(events: list[TraceEvent]) -> list[tuple[int, int]]:
    """The computed positions of each admission as [start, end); chunks without a gap are joined."""
    found: list[tuple[int, int]] = []
    for event in events:
        if event.kind == "admitted":
            found.append((event.facts["cached_tokens"],) * 2)
        elif event.kind == "chunk":
            start, end = found[-1]
            assert event.facts["start"] == end
            found[-1] = (start, end + event.facts["length"])
    return found


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_trace_has_the_prompt_all_chunks_cache_hits_and_the_answer(depth: int) -> None:
    events = Events()
    engine = make_engine(events, depth=depth)
    prompt = tuple(range(40))
    for name, cached in (("first", 0), ("second", 36)):
        traced = replace(request(name, prompt, 6), trace=True)
        [box, _] = run(engine, traced, request(f"beside {name}", (5, 6), 6))
        of = events.of[name]
        assert of[0].kind == "request" and of[0].tokens == prompt
        assert covered(of)[0][0] == cached
        assert covered(of)[0][1] >= len(prompt) + 5  # steps in flight at the end may be more
        deltas = [event for event in of if event.kind == "delta"]
        assert [token for event in deltas for token in event.tokens] == answer(prompt, 6)
        assert "".join(event.facts["text"] for event in deltas) == whole(box).text
        assert deltas[-1].facts["finish"] == "length"
        assert deltas[-1].facts["usage"] == whole(box).usage
        assert of[-1] is deltas[-1]
        assert [event.at_ns for event in of] == sorted(event.at_ns for event in of)
    assert set(events.of) == {"first", "second"}


@pytest.mark.parametrize("depth", [1, 2])
def test_preemptions_and_what_follows_are_shown(depth: int) -> None:
    events = Events(every=True)
    engine = make_engine(events, depth=depth, pages=24)
    prompts = {str(i): tuple(range(i, i + 3 + 5 * i)) for i in range(8)}
    run(engine, *[request(name, prompt, 20) for name, prompt in prompts.items()])
    preempted = 0
    for name, prompt in prompts.items():
        of = events.of[name]
        times = kinds(of).count("preempted")
        preempted += times
        assert kinds(of).count("admitted") == times + 1
        begins = [i for i, kind in enumerate(kinds(of)) if kind in ("admitted", "preempted")]
        assert [of[i].kind for i in begins] == ["admitted", *["preempted", "admitted"] * times]
        assert covered(of)[-1][1] >= len(prompt) + 19
        sampled = [token for event in of if event.kind == "delta" for token in event.tokens]
        assert sampled == answer(prompt, 20)
    assert preempted == engine.statistics().preemptions_total > 0


@pytest.mark.parametrize("source", ["ngram", "draft"])
def test_proposed_tokens_are_shown_with_their_source(source: str) -> None:
    events, prompt = Events(every=True), (1, 2, 3)

    class Proposals(RandomProposals):
        def propose(self, running, *, joining: int) -> None:
            super().propose(running, joining=joining)
            for sequence in running:
                sequence.propose(sequence.proposed, drafted=source == "draft")

    engine = make_engine(events, depth=1)
    right = answer(prompt, 12)
    engine._scheduler.speculation = Proposals(
        Random(1), draws=8, right=lambda asked: right, wrong=0.0
    )
    run(engine, request("a", prompt, 12))
    proposed = [event for event in events.of["a"] if "proposed_by" in event.facts]
    assert len(proposed) > 2
    for event in proposed:
        assert (event.kind, event.facts["length"]) == ("chunk", 1)
        assert event.facts["proposed_by"] == source
        assert event.tokens == (right[event.facts["start"] - len(prompt)],)


def test_an_aborted_request_ends_its_trace() -> None:
    events = Events(every=True)
    engine = make_engine(events)
    engine.add(request("a", (1, 2, 3), 10), lambda delta: None, arrived=0)
    engine.step()
    engine.abort("a")
    assert events.of["a"][-1].facts["finish"] == FinishReason.ABORTED.value
    while engine.step():
        pass
    assert events.of["a"][-1].facts["finish"] == FinishReason.ABORTED.value


def test_a_continued_answer_is_traced_from_its_tokens_on() -> None:
    events = Events(every=True)
    expected = answer((1, 2, 3), 6)
    begun = ResumeState(tuple(expected[:4]), 3)
    run(make_engine(events), replace(request("a", (1, 2, 3), 6), resume=begun))
    of = events.of["a"]
    assert (of[0].tokens, of[0].facts["resumed"]) == ((1, 2, 3), tuple(expected[:4]))
    deltas = [event for event in of if event.kind == "delta"]
    assert [token for event in deltas for token in event.tokens] == expected[4:]


def test_the_spans_of_images_are_shown() -> None:
    events = Events()
    spans = (ImageSpan(1, 2, True, b"\xab"), ImageSpan(4, 1, False, b"\xcd", cross_rows=7))
    one = replace(request("a", tuple(range(6)), 2), spans=spans)
    Tracer(events, lambda: 0).begin(Sequence(one, list(one.prompt)), lambda delta: None)
    assert events.of["a"][0].facts["spans"] == [
        {"start": 1, "length": 2, "whole": True, "cross_rows": 0, "digest": "ab"},
        {"start": 4, "length": 1, "whole": False, "cross_rows": 7, "digest": "cd"},
    ]
