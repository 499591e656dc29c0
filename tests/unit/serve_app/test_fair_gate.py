"""The gate that admits tenants by turns."""

import asyncio
import random
from collections import Counter

import pytest

from runtime.errors import OverloadedError
from serve_app.fair_gate import FairGate


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Callers:
    """Callers of a gate; records the order in which they are admitted."""

    def __init__(self, gate: FairGate) -> None:
        self.gate = gate
        self.entered: list[str] = []
        self.holding: Counter[str] = Counter()
        self.tasks: list[asyncio.Task[None]] = []
        self.may_end = asyncio.Semaphore(0)

    def call(self, tenant: str) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(self._work(tenant)))
        return self.tasks[-1]

    async def _work(self, tenant: str) -> None:
        async with self.gate.place(tenant):
            self.entered.append(tenant)
            self.holding[tenant] += 1
            try:
                await self.may_end.acquire()
            finally:
                self.holding[tenant] -= 1


async def test_another_tenant_is_admitted_next_however_many_wait() -> None:
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


async def test_one_tenant_does_not_hold_all_places() -> None:
    callers = Callers(FairGate(4, tenant_places=3))
    for _ in range(9):
        callers.call("flood")
    await settled()
    assert callers.entered == ["flood"] * 3
    callers.call("other")
    await settled()
    assert callers.entered == ["flood"] * 3 + ["other"]
    for _ in range(2):
        callers.may_end.release()
        await settled()
        assert callers.holding["flood"] == 3
    for _ in range(10):
        callers.may_end.release()
    await asyncio.gather(*callers.tasks)
    assert callers.gate.count == 0 and callers.entered.count("flood") == 9


async def test_a_cancelled_waiting_caller_is_skipped() -> None:
    callers = Callers(FairGate(1))
    first, second, third = (callers.call(tenant) for tenant in ("a", "b", "c"))
    await settled()
    second.cancel()
    first.cancel()  # in the same iteration of the loop: the place is free before the second has run
    await asyncio.gather(first, second, return_exceptions=True)
    await settled()
    assert callers.entered == ["a", "c"]
    callers.may_end.release()
    await third
    assert callers.gate.count == 0


async def test_a_caller_cancelled_on_admission_gives_its_place_back() -> None:
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
    with pytest.raises(OverloadedError, match="4 prompts of this client are waiting already"):
        await callers.gate.enter("flood")
    for tenant in ("b", "b", "c", "d"):
        callers.call(tenant)
    await settled()
    with pytest.raises(OverloadedError, match="9 prompts are running or waiting already"):
        await callers.gate.enter("e")
    for task in callers.tasks:
        task.cancel()
    await asyncio.gather(*callers.tasks, return_exceptions=True)
    assert callers.gate.count == 0


@pytest.mark.parametrize("tenant_places", [None, 2])
async def test_no_place_is_lost_under_random_cancellations(tenant_places: int | None) -> None:
    r = random.Random(1)
    callers = Callers(FairGate(3, tenant_places=tenant_places))
    for _ in range(400):
        callers.call(r.choice("aab"))
        if r.random() < 0.4:
            r.choice(callers.tasks).cancel()
        if r.random() < 0.5:
            callers.may_end.release()
        if r.random() < 0.7:
            await asyncio.sleep(0)
        assert callers.holding.total() <= 3
        assert max(callers.holding.values(), default=0) <= (tenant_places or 3)
    for _ in range(400):
        callers.may_end.release()
    await asyncio.gather(*callers.tasks, return_exceptions=True)
    assert callers.gate.count == 0
