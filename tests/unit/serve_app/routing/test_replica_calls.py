"""Calls of all replicas, or of any: some hang, fail or have ended."""

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any

import pytest

from runtime.errors import ModelUnavailableError, ReplicaLostError
from serve_app.routing import replica_calls
from serve_app.routing.replica_calls import Replicas
from tests.patience import pass_time, settled
from tests.unit.serve_app.fake_calls import FakeCalls

LOST = ReplicaLostError("it has ended")
TIMEOUT_S = 2.0


async def after(seconds: float, answer: Coroutine[Any, Any, Any]) -> Any:
    """The answer, which is there when so much time has passed and not before."""
    answering = asyncio.create_task(answer)
    await settled()
    if seconds:
        assert not answering.done()
        await pass_time(seconds)
    assert answering.done()
    return await answering


def ask(replicas: Replicas, **options: bool) -> Coroutine[Any, Any, list[Any]]:
    return replicas.ask_all("status", timeout_s=TIMEOUT_S, **options)


async def test_all_replicas_are_called_and_those_that_fail_are_left_out():
    calls = FakeCalls({"a": 1, "b": LOST, "c": 3})
    assert await Replicas(calls).ask_all("put", "x", 5, timeout_s=TIMEOUT_S) == [1, 3]
    assert calls.called == [(name, "put", "x", 5) for name in "abc"]


@pytest.mark.parametrize("options", [{}, {"until_answered": True}])
@pytest.mark.parametrize("answers", [{}, {"a": LOST}])
async def test_without_an_answer_the_list_is_empty(answers, options):
    assert await ask(Replicas(FakeCalls(answers)), **options) == []


async def test_a_replica_that_hangs_is_waited_for_once_and_called_again_when_it_has_answered():
    calls = FakeCalls({"a": (may_answer := asyncio.Event()), "b": "b"})
    replicas = Replicas(calls)
    assert await after(TIMEOUT_S, ask(replicas)) == ["b"]
    for _ in range(3):
        assert await after(0, ask(replicas)) == ["b"]
    assert [name for name, *_ in calls.called] == ["a", "b", "b", "b", "b"]
    may_answer.set()
    await settled()
    assert await after(0, ask(replicas)) == ["a", "b"]


async def test_a_late_call_that_fails_ends_the_hang():
    class Ends(FakeCalls):
        async def call(self, replica, method, *arguments):
            await super().call(replica, method, *arguments)
            raise LOST

    calls = Ends({"a": (may_end := asyncio.Event())})
    replicas = Replicas(calls)
    for seconds in (TIMEOUT_S, 0):
        with pytest.raises(TimeoutError, match="status"):
            await after(seconds, ask(replicas))
    may_end.set()
    await settled()
    assert await after(0, ask(replicas)) == []
    assert len(calls.called) == 2


async def test_a_caller_that_needs_an_answer_waits_for_the_first():
    first, second = asyncio.Event(), asyncio.Event()
    replicas = Replicas(calls := FakeCalls({"a": first, "b": second}))
    asking = asyncio.create_task(ask(replicas, until_answered=True))
    await settled()
    await pass_time(9 * TIMEOUT_S)
    later = asyncio.create_task(ask(replicas, until_answered=True))
    await settled()
    assert not asking.done() and not later.done() and len(calls.called) == 2
    second.set()
    assert [await asking, await later] == [["b"], ["b"]]
    assert len(calls.called) == 3, "the replica that hangs still gets one call at a time"


async def test_a_replica_that_hangs_is_called_if_the_other_begins_to_hang():
    first = asyncio.Event()
    replicas = Replicas(calls := FakeCalls({"a": first, "b": "b"}))
    assert await after(TIMEOUT_S, ask(replicas)) == ["b"]
    calls.answers["b"] = asyncio.Event()
    asking = asyncio.create_task(ask(replicas, until_answered=True))
    await settled()
    first.set()
    await pass_time(TIMEOUT_S)
    assert await asking == ["a"]


async def test_calls_are_delivered_in_order_to_a_replica_that_continues():
    calls = FakeCalls({"a": (may_answer := asyncio.Event()), "b": "b"})
    replicas = Replicas(calls)

    def change(number: int) -> Coroutine[Any, Any, list[Any]]:
        options = {"until_answered": True, "deliver": True}
        return replicas.ask_all("put", number, timeout_s=TIMEOUT_S, **options)

    assert await after(TIMEOUT_S, change(0)) == ["b"]
    for number in (1, 2, 3):
        assert await after(0, change(number)) == ["b"]
    assert [each for each in calls.called if each[0] == "a"] == [("a", "put", 0)]
    may_answer.set()
    await settled()
    assert [each[2] for each in calls.called if each[0] == "a"] == [0, 1, 2, 3]
    assert await after(0, change(4)) == ["a", "b"]


async def test_a_replica_that_ended_while_it_hung_gets_no_call():
    calls = FakeCalls({"a": (may_answer := asyncio.Event()), "b": "b"})
    replicas = Replicas(calls)
    await after(TIMEOUT_S, ask(replicas))
    await after(0, ask(replicas, until_answered=True, deliver=True))
    del calls.answers["a"]
    may_answer.set()
    await settled()
    assert [name for name, *_ in calls.called] == ["a", "b", "b"]


async def test_the_end_waits_for_calls_that_wait_for_a_replica_that_hangs():
    continues = asyncio.Event()
    replicas = Replicas(calls := FakeCalls({"hangs": continues, "answers": 1}))
    assert await replicas.await_late(1)
    for _ in range(2):
        asking = asyncio.create_task(replicas.ask_all("put", timeout_s=TIMEOUT_S, deliver=True))
        await settled()
        await pass_time(TIMEOUT_S)
        assert await asking == [1]
    ending = asyncio.create_task(replicas.await_late(60))
    await settled()
    await pass_time(30)
    assert not ending.done()
    continues.set()
    assert await ending and calls.called.count(("hangs", "put")) == 2


async def test_the_end_waits_for_a_limited_time():
    replicas = Replicas(FakeCalls({"hangs": asyncio.Event()}))
    asking = asyncio.create_task(replicas.ask_all("put", timeout_s=TIMEOUT_S, deliver=True))
    await settled()
    await pass_time(TIMEOUT_S)
    with pytest.raises(TimeoutError):
        await asking
    ending = asyncio.create_task(replicas.await_late(60))
    await settled()
    await pass_time(60)
    assert not await ending


async def test_few_calls_wait_for_a_replica_that_hangs(monkeypatch):
    monkeypatch.setattr(replica_calls, "MAX_LATE_CALLS", 3)
    calls = FakeCalls({"a": (may_answer := asyncio.Event()), "b": "b"})
    replicas = Replicas(calls)
    await after(TIMEOUT_S, ask(replicas))
    for _ in range(5):
        assert await after(0, ask(replicas, until_answered=True, deliver=True)) == ["b"]
    may_answer.set()
    await settled()
    assert [name for name, *_ in calls.called].count("a") == 3


async def test_replicas_that_get_no_further_call_are_still_there(monkeypatch):
    monkeypatch.setattr(replica_calls, "MAX_LATE_CALLS", 1)
    replicas = Replicas(FakeCalls({"a": (may_answer := asyncio.Event())}))
    with pytest.raises(TimeoutError):
        await after(TIMEOUT_S, ask(replicas))
    with pytest.raises(TimeoutError):
        await after(0, ask(replicas))
    asking = asyncio.create_task(replicas.ask_any("describe", patience_s=TIMEOUT_S))
    await settled()
    assert not asking.done()
    may_answer.set()
    assert await asking == "a"


async def test_a_call_that_waits_for_others_is_dropped_with_its_caller():
    calls = FakeCalls({"a": (may_answer := asyncio.Event())})
    replicas = Replicas(calls)
    with pytest.raises(TimeoutError):
        await after(TIMEOUT_S, ask(replicas))
    waiting = asyncio.create_task(ask(replicas, until_answered=True))
    await settled()
    waiting.cancel()
    await asyncio.wait({waiting})
    may_answer.set()
    await settled()
    assert len(calls.called) == 1
    assert await ask(replicas) == ["a"]


async def test_a_caller_that_leaves_cancels_no_call():
    calls = FakeCalls({"a": (may_answer := asyncio.Event())})
    asking = asyncio.create_task(ask(replicas := Replicas(calls)))
    await settled()
    asking.cancel()
    await asyncio.wait({asking})
    may_answer.set()
    assert await ask(replicas) == ["a"]


async def test_calls_have_no_context_of_the_request():
    request: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="none")

    class Seeing(FakeCalls):
        async def call(self, replica, method, *arguments):
            return request.get()

    request.set("of the caller")
    assert await ask(Replicas(Seeing({"a": 1, "b": 2}))) == ["none", "none"]


async def test_any_replica_answers_and_no_other_is_called():
    calls = FakeCalls({"a": "a", "b": "b"})
    answers = {await Replicas(calls).ask_any("describe", patience_s=TIMEOUT_S) for _ in range(50)}
    assert answers == {"a", "b"} and len(calls.called) == 50


async def test_another_replica_is_called_if_one_hangs_or_fails():
    calls = FakeCalls({"a": asyncio.Event(), "b": "b", "c": LOST})
    replicas = Replicas(calls)
    while all(name != "a" for name, *_ in calls.called):
        asking = asyncio.create_task(replicas.ask_any("describe", patience_s=TIMEOUT_S))
        await settled()
        await pass_time(TIMEOUT_S)
        assert await asking == "b"
    for _ in range(20):
        assert await after(0, replicas.ask_any("describe", patience_s=TIMEOUT_S)) == "b"
    assert [name for name, *_ in calls.called].count("a") == 1


async def test_the_only_replica_is_waited_for():
    calls = FakeCalls({"a": (may_answer := asyncio.Event())})
    asking = asyncio.create_task(Replicas(calls).ask_any("describe", patience_s=TIMEOUT_S))
    await settled()
    await pass_time(9 * TIMEOUT_S)
    assert not asking.done() and len(calls.called) == 1
    may_answer.set()
    assert await asking == "a"


async def test_the_error_of_a_replica_is_raised_if_all_fail():
    error = ModelUnavailableError("it does not fit")
    for other in (error, LOST):
        for _ in range(9):  # the replicas are called in a random order
            with pytest.raises(ModelUnavailableError, match="does not fit"):
                replicas = Replicas(FakeCalls({"a": error, "b": other}))
                await replicas.ask_any("describe", patience_s=1)
    with pytest.raises(ReplicaLostError, match="no replica"):
        await Replicas(FakeCalls({})).ask_any("describe", patience_s=1)
