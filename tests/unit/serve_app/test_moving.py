"""Tasks that wait go to replicas that begin them earlier; their readers see nothing of it."""

import asyncio
import dataclasses

import pytest

from runtime.engine.request import ResumeState
from runtime.errors import ModelUnavailableError, OverloadedError
from serve_app.gateway.failover import MOST_MOVES, FailoverRules
from serve_app.gateway.tasks import EmbeddingTask, RawText
from serve_app.transport.wire import Address
from tests.patience import HANG_S, until
from tests.unit.serve_app.speakers import (
    TASK,
    TEXT,
    Replicas,
    Speaker,
    answered,
    following,
)


class Better(Replicas):
    """Knows better places, and tells them one after the other; the last one again and again."""

    def __init__(self, *addresses: Address) -> None:
        super().__init__(*addresses)
        self.asked = 0
        self.better_ones: list[Address] = []

    async def better(self, task, *, avoid: frozenset[str] = frozenset()) -> Address | None:
        self.asked += 1
        if self.problem is not None:
            raise self.problem
        if len(self.better_ones) > 1:
            return self.better_ones.pop(0)
        return self.better_ones[0] if self.better_ones else None


async def test_a_task_that_waits_goes_where_it_begins_earlier_at_no_charge():
    first, second = Speaker(halts_at=0), Speaker()
    rules = FailoverRules(max_retries=0)
    async with following(first, second, rules=rules, directory=Better) as (backend, directory):
        answer = asyncio.create_task(answered(backend))
        await until(lambda: first.halted and directory.asked)
        directory.better_ones = [directory.addresses[1]]
        whole = await answer
        await until(lambda: not first.at_work)
    assert whole.text == TEXT and whole.usage.queue_ns > 1_000, "both waits are one"
    (again,) = second.tasks
    assert again.begun == ResumeState(had_turn=False), "it is not refused there, and waits its turn"
    assert dataclasses.replace(again, begun=None) == first.tasks[0]


async def test_an_answer_that_has_begun_stays():
    first, second = Speaker(halts_at=3), Speaker()
    async with following(first, second, directory=Better) as (backend, directory):
        directory.better_ones = [directory.addresses[1]]
        answer = asyncio.create_task(answered(backend))
        await until(lambda: first.halted)
        await asyncio.sleep(0.3)
        first.goes_on.set()
        assert (await answer).text == TEXT
    assert not second.tasks and not directory.asked


async def test_who_is_on_trial_and_vectors_are_not_moved():
    first, second = Speaker(dies_at=0), Speaker(halts_at=0)
    async with following(first, second, directory=Better) as (backend, directory):
        answer = asyncio.create_task(answered(backend))
        await until(lambda: second.halted)
        asked = directory.asked
        await asyncio.sleep(0.3)
        assert directory.asked == asked
        second.goes_on.set()
        assert (await answer).text == TEXT
    waiting = Speaker()

    async def waits(task):
        await asyncio.Event().wait()
        yield

    waiting.server._generate = waits
    async with following(waiting, directory=Better) as (backend, directory):
        task = EmbeddingTask("e", "demo", (RawText("hi"),))
        answer = asyncio.create_task(answered(backend, task))
        await asyncio.sleep(0.3)
        assert not directory.asked
        answer.cancel()


async def test_nobody_is_moved_for_ever():
    speakers = [Speaker(halts_at=0) for _ in range(2 * MOST_MOVES)]
    async with following(*speakers, directory=Better) as (backend, directory):
        directory.better_ones = directory.addresses[1:]
        answer = asyncio.create_task(answered(backend))
        await until(lambda: speakers[MOST_MOVES].halted)
        await asyncio.sleep(0.3)
        speakers[MOST_MOVES].goes_on.set()
        assert (await answer).text == TEXT
    asked = [len(speaker.tasks) for speaker in speakers]
    assert asked == [1] * (MOST_MOVES + 1) + [0] * (MOST_MOVES - 1)


@pytest.mark.parametrize("problem", [ModelUnavailableError("no"), OverloadedError("no")])
async def test_where_looking_for_a_better_place_fails_the_task_stays(problem):
    first = Speaker(halts_at=0)
    async with following(first, directory=Better) as (backend, directory):
        answer = asyncio.create_task(answered(backend))
        await until(lambda: first.halted)
        directory.problem = problem
        await until(lambda: directory.asked > 2)
        first.goes_on.set()
        assert (await answer).text == TEXT
    assert len(first.tasks) == 1


async def test_a_place_that_turns_out_to_be_full_costs_nobody_the_answer():
    first, full = Speaker(halts_at=0), Speaker(error=OverloadedError("full"))
    async with following(first, full, directory=Better) as (backend, directory):
        answer = asyncio.create_task(answered(backend))
        await until(lambda: first.halted)
        directory.better_ones = [directory.addresses[1]]
        await until(lambda: full.tasks)
        directory.better_ones = []
        first.goes_on.set()
        assert (await answer).text == TEXT


async def test_a_task_on_one_that_leaves_is_still_taken_over():
    """Both are said while it waits, that it waits and that the replica leaves."""
    first, second = Speaker(halts_at=0), Speaker()
    async with following(first, directory=Better) as (backend, directory):
        answer = asyncio.create_task(answered(backend, TASK))
        await until(lambda: directory.asked > 1)
        directory.addresses.append(await second.start())
        async with asyncio.timeout(HANG_S):
            await first.server.close(drain_s=60)
        assert (await answer).text == TEXT
        await second.server.close(drain_s=0)
