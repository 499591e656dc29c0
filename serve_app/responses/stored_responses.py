"""An ingress's access to stored responses.

They are held in memory by a deployment of the application, so that every ingress finds them and
they survive the end of an ingress. Each process of the deployment holds all of them. A starting
process copies them from a running one, so they survive new versions of the application and, with
two or more processes, the loss of all but one. Until Serve lists that process, changes reach the
others only: these hand over their recent changes when it is listed, or when they end. Responses are
not on disk: the loss of all processes loses them.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from runtime.errors import ModelUnavailableError, OverloadedError
from serve_app.logs import get_logger
from serve_app.responses.response_store import (
    ReplicatedEntry,
    ResponseStore,
    Selection,
    StoredResponse,
)
from serve_app.routing.replica_calls import NamedReplicaCalls, Replicas

TIMEOUT_S = 10.0
# How long all processes are waited for, if one has answered.
ANSWER_S = 1.0
# The largest response that is kept for a process that hangs, of `MAX_LATE_CALLS` at most.
DELIVERED_BYTES = 256 * 1024
# How long a process that hangs is waited for at the end. Serve replaces it in less time.
DELIVERY_S = 180.0
COPY_S = 60.0
COPY_ANSWER_S = 10.0
COPY_IDS = 1024
COPY_BYTES = 8 * 2**20
HAND_OVER_S = 10.0  # a third of the time that Serve gives a process to end
LISTED_POLL_S = 0.1

log = get_logger()


class StoredResponses:
    """The responses of all tenants.

    `max_bytes` limits what a call reads, as in `Selection`. Methods that read raise OverloadedError
    if no process answers. A process that hangs executes changes when it continues, before it is
    read again, but misses larger responses than `DELIVERED_BYTES` and changes after many others.
    """

    def __init__(self, processes: Replicas) -> None:
        self._processes = processes

    async def put(self, tenant: str, stored: StoredResponse) -> bool:
        """Store a response. True if at least one process has stored it."""
        try:
            deliver = stored.size <= DELIVERED_BYTES
            return any(await self._answers("put", tenant, stored, deliver=deliver))
        except OverloadedError:
            return False

    async def select(self, tenant: str, ids: Sequence[str], *, max_bytes: int) -> Selection:
        return _most_complete(await self._answers("select", tenant, tuple(ids), max_bytes))

    async def conversation(self, tenant: str, id: str, *, max_bytes: int) -> Selection:
        """The response and those that it continues, oldest first."""
        return _most_complete(await self._answers("conversation", tenant, id, max_bytes))

    async def delete(self, tenant: str, id: str) -> bool:
        """Delete a response. True if at least one process had it."""
        return any(await self._answers("delete", tenant, id, deliver=True))

    async def deliver(self) -> None:
        """Waits, at the end of an ingress, until processes that hang have executed the changes that
        wait for them, or are lost. Otherwise a deleted response might be found again."""
        if not await self._processes.await_late(DELIVERY_S):
            log.warning("response store has missed changes", seconds=DELIVERY_S)

    async def _answers(self, method: str, *arguments: Any, deliver: bool = False) -> list[Any]:
        ask_all = partial(
            self._processes.ask_all,
            method,
            *arguments,
            timeout_s=ANSWER_S,
            until_answered=True,
            deliver=deliver,
        )
        with suppress(TimeoutError, ModelUnavailableError):
            async with asyncio.timeout(TIMEOUT_S):
                answers = await ask_all()
                if not answers:
                    await self._processes.await_one()
                    answers = await ask_all()
                if answers:
                    return answers
        log.warning("response store does not answer", method=method)
        raise OverloadedError("the store of responses does not answer")


def _most_complete(found: list[Selection]) -> Selection:
    """The most complete result; a process that has started recently may lack responses."""
    return min(found, key=lambda each: (each.missing is not None, -each.size))


async def copy_from(processes: Replicas, store: ResponseStore) -> None:
    """Copies the responses of running processes into an empty store, as far as they answer in
    time."""
    try:
        async with asyncio.timeout(COPY_S):
            await processes.await_one()
            lists: list[list[str]] = await processes.ask_all("ids", timeout_s=COPY_ANSWER_S)
            await _copy(processes, store, max(lists, key=len, default=[]))
    except Exception as error:  # an incomplete store is better than none
        log.warning("not all responses copied", count=len(store.ids()), reason=repr(error))
    else:
        log.info("responses copied", count=len(store.ids()))


async def hand_over(processes: Replicas, store: ResponseStore) -> None:
    """Sends the recent changes of a store to the running processes, as far as they answer in time.
    Those that have executed them already ignore them."""
    try:
        async with asyncio.timeout(HAND_OVER_S):
            await _merge(processes, store.recently_deleted(), [])
            ids = store.recent_ids()
            while copies := store.copies(ids, COPY_BYTES):
                await _merge(processes, [], copies)
                ids = ids[ids.index(copies[-1].stored.id) + 1 :]
    except Exception as error:
        log.warning("not all recent changes handed over", reason=repr(error))


async def await_successors(processes: NamedReplicaCalls, own: str) -> None:
    """Waits until Serve lists the processes that replace the process `own`. TimeoutError if it does
    not."""
    async with asyncio.timeout(HAND_OVER_S):
        while not processes.names or own in processes.names:
            await asyncio.sleep(LISTED_POLL_S)


async def _merge(
    processes: Replicas, deleted: list[tuple[str, str]], copies: list[ReplicatedEntry]
) -> None:
    await processes.ask_all("merge", deleted, copies, timeout_s=HAND_OVER_S)


async def _copy(processes: Replicas, store: ResponseStore, ids: list[str]) -> None:
    while ids:
        page = ids[:COPY_IDS]
        answers: list[list[ReplicatedEntry]] = await processes.ask_all(
            "copies", page, COPY_BYTES, timeout_s=COPY_ANSWER_S
        )
        if not answers:
            raise OverloadedError("no process answers")
        found = {each.stored.id: each for copies in answers for each in copies}
        ends = [page.index(copies[-1].stored.id) + 1 for copies in answers if copies]
        end = min(ends, default=len(page))
        for each in (found[id] for id in page[:end] if id in found):
            store.put(each.tenant, each.stored, age_s=each.age_s)
        ids = ids[end:]
