"""A gate that lets tenants in by turns."""

import asyncio
import random
from collections import Counter

import pytest

from runtime.errors import OverloadedError
from serve_app.gateway.fair_gate import FairGate


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Callers:
    """Those at a gate, in the order in which they were let in."""

    def __init__(self, gate: FairGate) -> None:
        self.gate = gate
        self.entered: list[str] = []
        self.at_work: Counter[str] = Counter()
        self.tasks: list[asyncio.Task[None]] = []
        self.may_end = asyncio.Semaphore(0)

    def call(self, tenant: str) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(self._work(tenant)))
        return self.tasks[-1]

    async def _work(self, tenant: str) -> None:
        async with self.gate.place(tenant):
            self.entered.append(tenant)
            self.at_work[tenant] += 1
            try:
                await self.may_end.acquire()
            finally:
                self.at_work[tenant] -= 1


async def test_another_tenant_is_next_however_many_wait() -> None:
    callers = Callers(FairGate(4))
    for _ in range(528):
        callers.call("flood")
    await settled()
    other = callers.call("other")
    await settled()
    assert callers.entered == ["flood"] * 4
    callers.may_end.release()
    await settled()
    assert callers.entered == ["flood"] * 4 + ["other"]
    for _ in range(600):
        callers.may_end.release()
    await asyncio.gather(*callers.tasks)
    assert other.done() and callers.gate.count == 0


async def test_who_leaves_while_waiting_gives_the_place_to_the_next() -> None:
    callers = Callers(FairGate(1))
    first, second, third = (callers.call(tenant) for tenant in ("a", "b", "c"))
    await settled()
    second.cancel()
    first.cancel()  # in the same turn of the loop: the place is free before the second has left
    await asyncio.gather(first, second, return_exceptions=True)
    await settled()
    assert callers.entered == ["a", "c"]
    callers.may_end.release()
    await third
    assert callers.gate.count == 0


async def test_who_is_cancelled_when_let_in_gives_the_place_back() -> None:
    gate = FairGate(1)
    await gate.enter("a")
    waiting = asyncio.create_task(gate.enter("b"))
    await settled()
    gate.leave("a")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert gate.count == 0
    await asyncio.wait_for(gate.enter("c"), 600)


async def test_one_tenant_does_not_fill_the_queue() -> None:
    callers = Callers(FairGate(1, max_waiting=8, things="prompts"))
    for _ in range(1 + 4):
        callers.call("flood")
    await settled()
    with pytest.raises(OverloadedError, match="4 prompts of this client wait already"):
        await callers.gate.enter("flood")
    for tenant in ("b", "b", "c", "d"):
        callers.call(tenant)
    await settled()
    with pytest.raises(OverloadedError, match="9 prompts are at work or wait already"):
        await callers.gate.enter("e")
    for task in callers.tasks:
        task.cancel()
    await asyncio.gather(*callers.tasks, return_exceptions=True)
    assert callers.gate.count == 0


async def test_no_place_is_lost_whoever_leaves_when() -> None:
    r = random.Random(1)
    callers = Callers(FairGate(3))
    for _ in range(400):
        callers.call(r.choice("aab"))
        if r.random() < 0.4:
            r.choice(callers.tasks).cancel()
        if r.random() < 0.5:
            callers.may_end.release()
        if r.random() < 0.7:
            await asyncio.sleep(0)
        assert callers.at_work.total() <= 3
    for _ in range(400):
        callers.may_end.release()
    await asyncio.gather(*callers.tasks, return_exceptions=True)
    assert callers.gate.count == 0
