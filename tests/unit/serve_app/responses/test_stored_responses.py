"""Stored responses over several processes, of which some are lost or start late."""

import pytest

from runtime.errors import OverloadedError
from serve_app.responses import stored_responses
from serve_app.responses.response_store import ResponseStore, StoredResponse
from serve_app.responses.stored_responses import StoredResponses, copy_from
from tests.unit.serve_app.responses.fake_processes import LIMITS, FakeProcesses

MAX_BYTES = 2**16


def entry(id: str, previous: str | None = None, size: int = 10) -> StoredResponse:
    return StoredResponse(id, b"{}", b"x" * size, previous)


def two() -> tuple[FakeProcesses, StoredResponses]:
    processes = FakeProcesses(ResponseStore(LIMITS), ResponseStore(LIMITS))
    return processes, StoredResponses(processes)


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
    stored = StoredResponses(FakeProcesses(None))
    assert not await stored.put("a", entry("1"))
    with pytest.raises(OverloadedError, match="does not answer"):
        await stored.conversation("a", "1", max_bytes=MAX_BYTES)


async def test_a_call_waits_for_the_process_that_replaces_a_lost_one():
    stored = StoredResponses(FakeProcesses(spare=ResponseStore(LIMITS)))
    assert await stored.put("a", entry("1"))
    assert await ids(stored, "1") == ["1"]


async def test_a_new_process_copies_everything_in_pages(monkeypatch):
    monkeypatch.setattr(stored_responses, "COPY_BYTES", 3 * entry("0").size)
    monkeypatch.setattr(stored_responses, "COPY_IDS", 5)
    processes, stored = two()
    for id in range(12):
        await stored.put("ab"[id % 2], entry(str(id)))
    processes.stores[0].delete("a", "0")
    copy = ResponseStore(LIMITS)
    await copy_from(processes, copy)
    assert copy.ids() == [str(id) for id in range(12)]
    assert [each.id for each in copy.select("b", ["11"], MAX_BYTES).responses] == ["11"]


async def test_a_new_process_starts_empty_if_the_others_do_not_answer():
    copy = ResponseStore(LIMITS)
    await copy_from(FakeProcesses(None), copy)
    assert copy.ids() == []
