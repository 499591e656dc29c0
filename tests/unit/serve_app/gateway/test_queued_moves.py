"""Queued tasks move to replicas that start them earlier, unnoticed by their clients."""

import asyncio
import dataclasses

import pytest

from runtime.engine.request import ResumeState
from runtime.errors import ModelUnavailableError, OverloadedError
from serve_app.gateway.failover import MAX_MOVES, FailoverRules
from serve_app.messages.tasks import EmbeddingTask, RawText
from serve_app.transport.wire import Heartbeat
from tests.patience import HANG_S, settled, until
from tests.unit.serve_app.answers import TASK, answer_of
from tests.unit.serve_app.gateway.resumable_replicas import TEXT, ResumableReplica, serving


async def test_a_queued_task_moves_without_being_charged_a_retry():
    first, second = ResumableReplica(halts_at=0), ResumableReplica()
    async with serving(first, second, rules=FailoverRules(max_retries=0)) as (backend, replicas):
        answer = asyncio.create_task(answer_of(backend))
        await until(lambda: first.halted and replicas.earlier_calls)
        replicas.earlier = [replicas.addresses[1]]
        whole = await answer
        await until(lambda: not first.running)
    assert whole.text == TEXT and whole.usage.queue_ns > 1_000, "both waits are queueing time"
    (again,) = second.tasks
    assert again.resume == ResumeState(had_turn=False), "the replica queues it and does not refuse"
    assert dataclasses.replace(again, resume=None) == first.tasks[0]


async def test_an_answer_that_has_begun_is_not_moved(heartbeats):
    first, second = ResumableReplica(halts_at=3), ResumableReplica()
    async with serving(first, second) as (backend, replicas):
        replicas.earlier = [replicas.addresses[1]]
        answer = asyncio.create_task(answer_of(backend))
        await until(lambda: first.halted)
        await several(heartbeats)
        first.resume.set()
        assert (await answer).text == TEXT
    assert not second.tasks and not replicas.earlier_calls


async def several(heartbeats: list[Heartbeat]) -> None:
    """Returns after further heartbeats, each of which may move a queued task."""
    before = len(heartbeats)
    await until(lambda: len(heartbeats) >= before + 3)
    await settled()


async def test_tasks_that_lost_a_replica_and_embeddings_are_not_moved(heartbeats):
    first, second = ResumableReplica(dies_at=0), ResumableReplica(halts_at=0)
    async with serving(first, second) as (backend, replicas):
        answer = asyncio.create_task(answer_of(backend))
        await until(lambda: second.halted)
        calls = replicas.earlier_calls
        await several(heartbeats)
        assert replicas.earlier_calls == calls
        second.resume.set()
        assert (await answer).text == TEXT
    waiting = ResumableReplica()

    async def waits(task):
        await asyncio.Event().wait()
        yield

    waiting.generate = waits
    async with serving(waiting) as (backend, replicas):
        task = EmbeddingTask("e", "demo", (RawText("hi"),))
        answer = asyncio.create_task(answer_of(backend, task))
        await several(heartbeats)
        assert not replicas.earlier_calls
        answer.cancel()


async def test_the_number_of_moves_is_limited(heartbeats):
    fakes = [ResumableReplica(halts_at=0) for _ in range(2 * MAX_MOVES)]
    async with serving(*fakes) as (backend, replicas):
        replicas.earlier = replicas.addresses[1:]
        answer = asyncio.create_task(answer_of(backend))
        await until(lambda: fakes[MAX_MOVES].halted)
        await several(heartbeats)
        fakes[MAX_MOVES].resume.set()
        assert (await answer).text == TEXT
    tasks = [len(fake.tasks) for fake in fakes]
    assert tasks == [1] * (MAX_MOVES + 1) + [0] * (MAX_MOVES - 1)


@pytest.mark.parametrize("problem", [ModelUnavailableError("no"), OverloadedError("no")])
async def test_a_task_stays_if_no_other_replica_can_be_chosen(problem):
    first = ResumableReplica(halts_at=0)
    async with serving(first) as (backend, replicas):
        answer = asyncio.create_task(answer_of(backend))
        await until(lambda: first.halted)
        replicas.problem = problem
        await until(lambda: replicas.earlier_calls > 2)
        first.resume.set()
        assert (await answer).text == TEXT
    assert len(first.tasks) == 1


async def test_a_task_that_was_moved_to_a_full_replica_is_still_answered():
    first, full = ResumableReplica(halts_at=0), ResumableReplica(error=OverloadedError("full"))
    async with serving(first, full) as (backend, replicas):
        answer = asyncio.create_task(answer_of(backend))
        await until(lambda: first.halted)
        replicas.earlier = [replicas.addresses[1]]
        await until(lambda: full.tasks)
        replicas.earlier = []
        first.resume.set()
        assert (await answer).text == TEXT


async def test_a_queued_task_on_a_draining_replica_is_handed_over():
    """The replica sends both heartbeats and that it drains."""
    first, second = ResumableReplica(halts_at=0), ResumableReplica()
    async with serving(first) as (backend, replicas):
        answer = asyncio.create_task(answer_of(backend, TASK))
        await until(lambda: replicas.earlier_calls > 1)
        replicas.addresses.append(await second.start())
        async with asyncio.timeout(HANG_S):
            await first.server.close(drain_s=60)
        assert (await answer).text == TEXT
        await second.server.close(drain_s=0)
