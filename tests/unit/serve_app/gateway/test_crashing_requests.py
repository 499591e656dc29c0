"""Requests that crash their replicas: each ends after `max_retries`, its neighbours continue."""

import asyncio
import dataclasses
from contextlib import aclosing

import pytest

from runtime.errors import ReplicaLostError
from serve_app.gateway.failover import (
    PROGRESS_TOKENS,
    TOTAL_FACTOR,
    FailoverRules,
    FailoverState,
)
from serve_app.gateway.last_attempts import UNREAD_S, LastAttempts
from serve_app.messages.tasks import ChatTask
from tests.patience import HANG_S, pass_time, settled, until
from tests.unit.serve_app.answers import TASK, answer_of
from tests.unit.serve_app.gateway.resumable_replicas import TEXT, WORDS, ResumableReplica, serving

NEIGHBOURS = 7
STEP_S = 0.002  # of a replica that computes a token while the previous one is delivered
CRASHING = dataclasses.replace(TASK, id="crashing")


class CrashingReplica(ResumableReplica):
    """Dies before token `crashes_at` of the task "crashing", once all its neighbours run here too.

    Neighbours that this replica received first stop at their token `stops_at`.
    """

    def __init__(self, crashes_at: int = 0, stops_at: int = 2, **options) -> None:
        super().__init__(**options)
        self.crashes_at = crashes_at
        self.stops_at = stops_at

    async def before(self, task: ChatTask, index: int) -> None:
        await asyncio.sleep(STEP_S)
        if task.id == "crashing" and index == self.crashes_at:
            if task.resume is None:
                await until(lambda: self.running > NEIGHBOURS)
            self.die()
            await asyncio.Event().wait()
        if task.id != "crashing" and task.resume is None and index == self.stops_at:
            self.halted += 1
            await asyncio.Event().wait()
        await super().before(task, index)


def neighbours() -> list[ChatTask]:
    return [dataclasses.replace(TASK, id=f"neighbour {index}") for index in range(NEIGHBOURS)]


@pytest.mark.parametrize("max_retries", [1, 2, 4])
@pytest.mark.parametrize("stops_at", [0, 2])
@pytest.mark.parametrize("crashes_at", [0, 1, 3])
async def test_a_crashing_request_ends_alone_after_max_retries(crashes_at, stops_at, max_retries):
    """Every replica gets all tasks: each one follows the crashing request, and those that stop at
    token 0 have lost as many replicas as the crashing request when it is on its last attempt."""
    replicas = [CrashingReplica(crashes_at, stops_at) for _ in range(max_retries + 4)]
    rules = FailoverRules(max_retries=max_retries)
    async with serving(*replicas, rules=rules) as (backend, _):
        answers = [asyncio.create_task(answer_of(backend, task)) for task in neighbours()]
        await until(lambda: replicas[0].halted == NEIGHBOURS)
        with pytest.raises(ReplicaLostError, match=f"`failover.max_retries` is {max_retries}"):
            await answer_of(backend, CRASHING)
        assert [answer.text for answer in await asyncio.gather(*answers)] == [TEXT] * NEIGHBOURS
    deaths = sum(replica.dying is not None for replica in replicas)
    # Tokens that were not delivered before the first crash are progress of the second attempt.
    assert max_retries + 1 <= deaths <= max_retries + 2


async def test_the_crash_of_one_replica_ends_no_stream():
    first, second = CrashingReplica(), CrashingReplica()
    async with serving(first, second, rules=FailoverRules(max_retries=1)) as (backend, _):
        answers = [asyncio.create_task(answer_of(backend, task)) for task in neighbours()]
        await until(lambda: first.halted == NEIGHBOURS)
        first.die()
        assert [answer.text for answer in await asyncio.gather(*answers)] == [TEXT] * NEIGHBOURS


@pytest.mark.parametrize("tokens", [PROGRESS_TOKENS, PROGRESS_TOKENS - 1])
async def test_losses_are_counted_since_the_last_progress(tokens):
    first, second, third = (
        ResumableReplica(dies_at=2),
        ResumableReplica(dies_at=2 + tokens),
        ResumableReplica(),
    )
    rules = FailoverRules(max_retries=1)
    async with serving(first, second, third, rules=rules) as (backend, _):
        if tokens == PROGRESS_TOKENS:
            assert (await answer_of(backend)).text == TEXT
        else:
            with pytest.raises(ReplicaLostError, match=r"2 of them in a row"):
                await answer_of(backend)
    assert bool(third.tasks) == (tokens == PROGRESS_TOKENS)


async def test_a_request_that_crashes_replicas_after_progress_ends_too(monkeypatch):
    monkeypatch.setattr("serve_app.gateway.failover.PROGRESS_TOKENS", 1)
    replicas = [ResumableReplica(dies_at=index) for index in range(1, len(WORDS))]
    async with serving(*replicas, rules=FailoverRules(max_retries=1)) as (backend, _):
        with pytest.raises(ReplicaLostError, match=f"has lost {TOTAL_FACTOR + 1} replicas"):
            await answer_of(backend)
    assert sum(replica.dying is not None for replica in replicas) == TOTAL_FACTOR + 1


async def test_a_cancelled_request_on_its_last_attempt_lets_the_next_one_start():
    first = CrashingReplica()
    second = ResumableReplica(halts_at=3)
    rules = FailoverRules(max_retries=1)
    async with serving(first, second, rules=rules) as (backend, _):
        answers = {
            task.id: asyncio.create_task(answer_of(backend, task)) for task in neighbours()[:2]
        }
        await until(lambda: first.halted == 2)
        first.die()
        await until(lambda: second.halted == 1)
        assert len(second.tasks) == 1, "the other one waits"
        cancelled = answers.pop(second.tasks[0].id)
        cancelled.cancel()
        second.resume.set()
        (remaining,) = answers.values()
        assert (await remaining).text == TEXT


async def test_a_client_that_does_not_read_delays_the_last_attempts_of_others_for_seconds():
    first, second = CrashingReplica(), ResumableReplica(halts_at=3)
    rules = FailoverRules(max_retries=1, silence_s=HANG_S)
    async with serving(first, second, rules=rules) as (backend, _):
        reads = asyncio.Event()
        stopped: list[str] = []

        async def reader(task: ChatTask) -> str:
            text = ""
            async with aclosing(backend.generate(task)) as deltas:
                async for delta in deltas:
                    text += delta.text
                    if second.tasks and not stopped:
                        stopped.append(task.id)
                        await reads.wait()
            return text

        answers = [asyncio.create_task(reader(task)) for task in neighbours()[:2]]
        await until(lambda: first.halted == 2)
        first.die()
        await until(lambda: stopped)
        await pass_time(UNREAD_S / 2)
        assert len(second.tasks) == 1, "the other one waits"
        await pass_time(UNREAD_S)
        await until(lambda: len(second.tasks) == 2)
        second.resume.set()
        reads.set()
        assert await asyncio.gather(*answers) == [TEXT] * 2


async def test_last_attempts_of_different_models_do_not_wait_for_each_other():
    attempts = LastAttempts()
    one, other = (
        FailoverState(dataclasses.replace(TASK, model=model), FailoverRules(max_retries=1))
        for model in ("one", "two")
    )
    for state in (one, other):
        state.lose_replica("killed", at_work=True)
    async with asyncio.timeout(HANG_S), attempts.place(one), attempts.place(other):
        waiting = asyncio.create_task(attempts.place(one).__aenter__())
        await settled()
        assert not waiting.done()
        waiting.cancel()


async def test_the_death_of_an_idle_replica_counts_for_no_task():
    first, second = ResumableReplica(), ResumableReplica(dies_at=len(WORDS) - 1)
    third = ResumableReplica()
    rules = FailoverRules(max_retries=1)
    async with serving(first, second, third, rules=rules) as (backend, replicas):
        await answer_of(backend)  # leaves an idle connection
        first.die()
        assert first.dying is not None
        await first.dying
        del replicas.addresses[0]
        assert (await answer_of(backend)).text == TEXT
