"""Stored responses over several processes, of which some hang, are lost or start late."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import pytest

from runtime.errors import OverloadedError
from serve_app.responses import stored_responses
from serve_app.responses.response_store import ResponseStore, StoredResponse
from serve_app.responses.stored_responses import (
    ANSWER_S,
    DELIVERED_BYTES,
    HAND_OVER_S,
    TIMEOUT_S,
    StoredResponses,
    await_successors,
    copy_from,
    hand_over,
)
from serve_app.routing.replica_calls import Replicas
from tests.patience import pass_time, settled
from tests.unit.serve_app.responses.fake_processes import LIMITS, FakeProcesses, stored_by

T = TypeVar("T")

MAX_BYTES = 2**16


def entry(id: str, previous: str | None = None, size: int = 10) -> StoredResponse:
    return StoredResponse(id, b"{}", b"x" * size, previous)


def two() -> tuple[FakeProcesses, StoredResponses]:
    processes = FakeProcesses(ResponseStore(LIMITS), ResponseStore(LIMITS))
    return processes, stored_by(processes)


async def ids(stored: StoredResponses, id: str) -> list[str]:
    return [each.id for each in (await stored.conversation("a", id, max_bytes=MAX_BYTES)).responses]


@pytest.mark.parametrize("lost", [0, 1])
async def test_responses_survive_the_loss_of_one_of_two_processes(lost):
    processes, stored = two()
    assert await stored.put("a", entry("1"))
    processes.stores[lost] = None
    assert await stored.put("a", entry("2", "1"))
    assert await ids(stored, "2") == ["1", "2"]


@pytest.mark.parametrize("replaced", [0, 1])
async def test_a_process_that_started_late_does_not_hide_what_the_other_has(replaced):
    processes, stored = two()
    await stored.put("a", entry("1"))
    processes.stores[replaced] = ResponseStore(LIMITS)
    await stored.put("a", entry("2", "1"))
    assert await ids(stored, "2") == ["1", "2"]
    assert [
        each.id for each in (await stored.select("a", ["1"], max_bytes=MAX_BYTES)).responses
    ] == ["1"]
    assert await stored.delete("a", "1")
    assert (await stored.select("a", ["1"], max_bytes=MAX_BYTES)).missing == "1"


async def test_without_processes_reading_is_refused_and_writing_reports_it():
    stored = stored_by(FakeProcesses(None))
    assert not await stored.put("a", entry("1"))
    with pytest.raises(OverloadedError, match="does not answer"):
        await stored.conversation("a", "1", max_bytes=MAX_BYTES)


async def test_a_call_waits_for_the_process_that_replaces_a_lost_one():
    stored = stored_by(FakeProcesses(spare=ResponseStore(LIMITS)))
    assert await stored.put("a", entry("1"))
    assert await ids(stored, "1") == ["1"]


async def late(answer: Awaitable[T]) -> T:
    """The answer, which is not there before the time for it has passed."""
    answering = asyncio.ensure_future(answer)
    await settled()
    assert not answering.done()
    await pass_time(ANSWER_S)
    return await answering


async def without_delay(answer: Awaitable[T]) -> T:
    answering = asyncio.ensure_future(answer)
    await settled()
    assert answering.done()
    return await answering


@pytest.mark.parametrize("hanging", ["0", "1"])
async def test_a_process_that_hangs_delays_one_call_and_has_all_changes_when_it_continues(hanging):
    processes, stored = two()
    assert await stored.put("a", entry("1"))
    processes.hanging[hanging] = may_continue = asyncio.Event()
    assert await late(stored.put("a", entry("2", "1")))
    assert await without_delay(ids(stored, "2")) == ["1", "2"]
    assert await without_delay(stored.put("a", entry("3", "2")))
    assert await without_delay(stored.put("a", entry("4", "3")))
    assert await without_delay(ids(stored, "3")) == ["1", "2", "3"]
    for id in ("1", "3"):
        assert await without_delay(stored.delete("a", id))
    (other,) = {"0", "1"} - {hanging}
    continued = processes.stores[int(hanging)]
    assert continued.ids() == ["1"]
    may_continue.set()
    await settled()
    assert continued.ids() == ["2", "4"]
    processes.stores[int(other)] = None
    assert (await stored.select("a", ["1"], max_bytes=MAX_BYTES)).missing == "1"
    assert (await stored.select("a", ["2"], max_bytes=MAX_BYTES)).missing is None


async def test_a_process_that_hangs_misses_large_responses():
    processes, stored = two()
    processes.hanging["1"] = may_continue = asyncio.Event()
    assert await late(stored.put("a", entry("1")))
    assert await without_delay(stored.put("a", entry("2", size=DELIVERED_BYTES)))
    may_continue.set()
    await settled()
    assert [store.ids() for store in processes.stores] == [["1", "2"], ["1"]]
    found = await stored.select("a", ["2"], max_bytes=2 * DELIVERED_BYTES)
    assert found.missing is None


async def test_a_reader_waits_for_the_only_process_if_it_hangs():
    processes = FakeProcesses(ResponseStore(LIMITS))
    stored = stored_by(processes)
    await stored.put("a", entry("1"))
    processes.hanging["0"] = may_continue = asyncio.Event()
    reading = [asyncio.create_task(ids(stored, "1")) for _ in range(3)]
    await pass_time(TIMEOUT_S / 2)
    reading.append(asyncio.create_task(ids(stored, "1")))
    await settled()
    assert not any(each.done() for each in reading)
    may_continue.set()
    assert await asyncio.gather(*reading) == [["1"]] * 4


async def test_a_call_is_refused_if_the_only_process_hangs_for_long():
    processes = FakeProcesses(ResponseStore(LIMITS))
    processes.hanging["0"] = asyncio.Event()
    stored = stored_by(processes)
    reading = asyncio.create_task(ids(stored, "1"))
    storing = asyncio.create_task(stored.put("a", entry("1")))
    await settled()
    await pass_time(TIMEOUT_S)
    with pytest.raises(OverloadedError, match="does not answer"):
        await reading
    assert not await storing


async def test_a_new_process_copies_everything_in_pages(monkeypatch):
    monkeypatch.setattr(stored_responses, "COPY_BYTES", 3 * entry("0").size)
    monkeypatch.setattr(stored_responses, "COPY_IDS", 5)
    processes, stored = two()
    for id in range(12):
        await stored.put("ab"[id % 2], entry(str(id)))
    processes.stores[0].delete("a", "0")
    processes.stores.append(ResponseStore(LIMITS))  # has started as recently
    copy = ResponseStore(LIMITS)
    await copy_from(Replicas(processes), copy)
    assert copy.ids() == [str(id) for id in range(12)]
    assert [each.id for each in copy.select("b", ["11"], MAX_BYTES).responses] == ["11"]


async def test_a_new_process_copies_from_the_process_that_does_not_hang():
    processes, stored = two()
    for id in range(3):
        await stored.put("a", entry(str(id)))
    processes.hanging["0"] = asyncio.Event()
    copy = ResponseStore(LIMITS)
    copying = asyncio.create_task(copy_from(Replicas(processes), copy))
    await settled()
    assert copy.ids() == []
    await pass_time(stored_responses.COPY_ANSWER_S)
    await copying
    assert copy.ids() == ["0", "1", "2"]


@pytest.mark.parametrize("pages", [1, 3])
async def test_changes_before_a_process_is_listed_are_handed_over_to_it(monkeypatch, pages):
    monkeypatch.setattr(stored_responses, "COPY_BYTES", 4 * entry("0").size // pages)
    processes, stored = two()
    for id in ("kept", "deleted", "deleted later"):
        await stored.put("a", entry(id))
    starting = ResponseStore(LIMITS)
    await copy_from(Replicas(processes), starting)
    for id in ("new", "newer"):
        await stored.put("a", entry(id))
    await stored.delete("a", "deleted")
    processes.stores.append(starting)
    await stored.delete("a", "deleted later")
    await hand_over(Replicas(processes), processes.stores[0])
    processes.stores[:2] = [None, None]
    assert starting.ids() == ["kept", "new", "newer"]
    assert await ids(stored, "new") == ["new"]


async def test_changes_are_handed_over_as_far_as_processes_answer():
    processes, stored = two()
    await stored.put("a", entry("1"))
    processes.hanging["1"] = asyncio.Event()
    handing = asyncio.create_task(hand_over(Replicas(processes), processes.stores[0]))
    await settled()
    await pass_time(HAND_OVER_S)
    await handing
    await hand_over(Replicas(FakeProcesses(None)), processes.stores[0])


async def test_a_process_that_ends_waits_until_others_are_listed_instead():
    processes = FakeProcesses(ResponseStore(LIMITS))
    waiting = asyncio.create_task(await_successors(processes, "0"))
    await settled()
    assert not waiting.done()
    processes.stores = []
    await pass_time(1.0)
    assert not waiting.done()
    processes.first, processes.stores = 1, [ResponseStore(LIMITS)]
    await waiting
    waiting = asyncio.create_task(await_successors(processes, "1"))
    await settled()
    await pass_time(HAND_OVER_S)
    with pytest.raises(TimeoutError):
        await waiting


async def test_a_new_process_starts_empty_if_the_others_do_not_answer():
    copy = ResponseStore(LIMITS)
    await copy_from(Replicas(FakeProcesses(None)), copy)
    assert copy.ids() == []
