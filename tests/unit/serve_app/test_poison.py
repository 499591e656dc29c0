"""Requests that kill replicas: stopped after the second one, and nobody goes down with them."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from runtime.engine.request import FinishReason
from runtime.errors import ReplicaLostError
from serve_app.gateway.failover import CLEARING_TOKENS, FailoverRules
from serve_app.gateway.tasks import ChatDelta, ChatTask
from serve_app.transport.client import StreamClient
from serve_app.transport.server import StreamServer
from tests.patience import HANG_S, until
from tests.unit.serve_app.pretend import USAGE
from tests.unit.serve_app.speakers import (
    TASK,
    TEXT,
    WORDS,
    Speaker,
    answered,
    following,
)

CROWD = 7


class Allergic(Speaker):
    """Dies of the task "poison" at one of its tokens, once it is at work on the crowd."""

    def __init__(self, deadly_at: int = 0, **options) -> None:
        super().__init__(**options)
        self.deadly_at = deadly_at
        self.on_trial: set[str] = set()
        self.most_on_trial = 0

    async def before(self, task: ChatTask, index: int) -> None:
        begun = len(task.begun.tokens) if task.begun else 0
        if task.begun is not None:
            on_trial = index < begun + CLEARING_TOKENS
            (self.on_trial.add if on_trial else self.on_trial.discard)(task.id)
            self.most_on_trial = max(self.most_on_trial, len(self.on_trial))
        await asyncio.sleep(0.002)
        if task.id == "poison" and index == self.deadly_at:
            await until(lambda: self.at_work > CROWD or task.begun is not None)
            self.die()
            await asyncio.Event().wait()
        if task.id != "poison" and task.begun is None and index == 2:
            self.halted += 1
            await asyncio.Event().wait()  # in the middle of the answer when this one dies
        await super().before(task, index)


def crowd() -> list[ChatTask]:
    return [dataclasses.replace(TASK, id=f"innocent {index}") for index in range(CROWD)]


POISON = dataclasses.replace(TASK, id="poison")


@pytest.mark.parametrize("deadly_at", [0, 1, 3])
async def test_poison_is_stopped_after_the_second_replica_and_nobody_else_is(deadly_at):
    speakers = [Allergic(deadly_at) for _ in range(4)]
    async with following(*speakers, rules=FailoverRules(max_retries=9)) as (backend, _):
        innocent = [asyncio.create_task(answered(backend, task)) for task in crowd()]
        await until(lambda: speakers[0].halted == CROWD)
        with pytest.raises(ReplicaLostError, match="2 replicas of model 'demo' died while"):
            await answered(backend, POISON)
        assert [answer.text for answer in await asyncio.gather(*innocent)] == [TEXT] * CROWD
    assert [speaker.dying is not None for speaker in speakers] == [True, True, False, False]
    assert all(task.id != "poison" for speaker in speakers[2:] for task in speaker.tasks)


async def test_who_was_at_work_on_a_dead_replica_goes_on_one_at_a_time():
    first, second = Allergic(), Allergic()
    async with following(first, second) as (backend, _):
        innocent = [asyncio.create_task(answered(backend, task)) for task in crowd()]
        await until(lambda: first.halted == CROWD)
        first.die()
        await asyncio.gather(*innocent)
    assert second.most_on_trial == 1


async def test_who_waited_for_its_turn_is_not_charged_with_a_death():
    """Two replicas are killed from outside, soon after each other: only the one that was on trial
    then cannot be told from poison."""
    first, second, third = Allergic(), Allergic(halts_at=3), Allergic()
    rules = FailoverRules(max_retries=1)
    async with following(first, second, third, rules=rules) as (backend, _):
        innocent = [asyncio.create_task(answered(backend, task)) for task in crowd()]
        await until(lambda: first.halted == CROWD)
        first.die()
        await until(lambda: second.halted == 1)
        second.die()
        answers = await asyncio.gather(*innocent, return_exceptions=True)
    told = [answer for answer in answers if isinstance(answer, Exception)]
    assert len(told) == 1 and isinstance(told[0], ReplicaLostError)
    assert all(answer.text == TEXT for answer in answers if answer not in told)


async def test_those_on_trial_take_turns_over_their_tenants():
    started: list[str] = []
    may_go_on = asyncio.Event()

    async def generate(task: ChatTask) -> AsyncGenerator[ChatDelta, None]:
        started.append(task.id)
        await may_go_on.wait()
        yield ChatDelta(finish=FinishReason.STOP, usage=USAGE)

    async def ask(id: str, tenant: str) -> None:
        task = dataclasses.replace(TASK, id=id, tenant=tenant)
        async with aclosing(client.generate(address, task, trial_tokens=3)) as told:
            async for _ in told:
                pass

    server, client = StreamServer(generate), StreamClient(silence_s=HANG_S)
    address = await server.start("127.0.0.1")
    asked = [asyncio.create_task(ask(f"flood {number}", "flood")) for number in range(9)]
    await until(lambda: server._trial.count == 9)
    asked.append(asyncio.create_task(ask("other", "other")))
    await until(lambda: server._trial.count == 10)
    may_go_on.set()
    await asyncio.gather(*asked)
    client.close()
    await server.close(drain_s=0)
    assert started.index("other") <= 2, "one was on trial, one of the flood was next"


@pytest.mark.parametrize(("drawn", "acquitted"), [(CLEARING_TOKENS, True), (2, False)])
async def test_who_gets_further_than_where_a_replica_died_is_acquitted(drawn, acquitted):
    first, second, third = Speaker(dies_at=2), Speaker(dies_at=2 + drawn), Speaker()
    async with following(first, second, third) as (backend, _):
        if acquitted:
            assert (await answered(backend)).text == TEXT
        else:
            with pytest.raises(ReplicaLostError, match="died while"):
                await answered(backend)
    assert bool(third.tasks) == acquitted


async def test_a_reader_who_leaves_makes_way_for_the_next_on_trial():
    first, second = Allergic(), Allergic(halts_at=3)
    async with following(first, second) as (backend, _):
        innocent = [
            asyncio.create_task(answered(backend, task), name=task.id) for task in crowd()[:2]
        ]
        await until(lambda: first.halted == 2)
        first.die()
        await until(lambda: second.halted == 1)
        tried = second.tasks[0].id
        (leaver,) = (
            each for each, task in zip(innocent, crowd(), strict=False) if task.id == tried
        )
        (stays,) = (each for each in innocent if each is not leaver)
        leaver.cancel()
        second.goes_on.set()
        assert (await stays).text == TEXT


async def test_a_dead_replica_that_nobody_was_at_work_on_charges_nobody():
    first, second = Speaker(), Speaker(dies_at=len(WORDS) - 1)
    third = Speaker()
    async with following(first, second, third) as (backend, directory):
        await answered(backend)  # leaves a connection behind
        first.die()
        assert first.dying is not None
        await first.dying
        del directory.addresses[0]
        assert (await answered(backend)).text == TEXT
