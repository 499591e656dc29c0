"""A semaphore that serves tenants in turn, in front of whatever works on few things at a time."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from runtime.engine.fairness import FairQueue, may_enter
from runtime.errors import OverloadedError


class FairGate:
    """At most `places` holders at a time; who waits is let in as by `FairQueue`.

    `max_waiting`: how many may wait, of whom one tenant has its share alone (`may_enter`); None:
    any number. `things`: what waits, for error messages. For one event loop.
    """

    def __init__(
        self, places: int, *, max_waiting: int | None = None, things: str = "requests"
    ) -> None:
        assert places > 0
        self._places = places
        self._max_waiting = max_waiting
        self._things = things
        self._holders: Counter[str] = Counter()
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    @property
    def count(self) -> int:
        """Those that have a place and those that wait."""
        return self._holders.total() + len(self._waiting)

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        await self.enter(tenant)
        try:
            yield
        finally:
            self.leave(tenant)

    async def enter(self, tenant: str) -> None:
        """Wait for a place, which has to be given back by `leave`. OverloadedError: too many
        wait."""
        if self._holders.total() < self._places:
            self._holders[tenant] += 1
            return
        self._check_room(tenant)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.add(tenant, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(tenant, turn)
            else:
                self.leave(tenant)
            raise

    def leave(self, tenant: str) -> None:
        self._holders[tenant] -= 1
        if not self._holders[tenant]:
            del self._holders[tenant]
        for waiting, turn in self._waiting.in_turn(self._holders):
            if not turn.done():  # else it is cancelled, and its task has yet to notice that
                self._waiting.serve(waiting, turn)
                self._holders[waiting] += 1
                turn.set_result(None)
                return

    def _check_room(self, tenant: str) -> None:
        if self._max_waiting is None:
            return
        own, total = self._waiting.count(tenant), len(self._waiting)
        if total >= self._max_waiting:
            raise OverloadedError(f"{self.count:,} {self._things} are at work or wait already")
        if not may_enter(own, total, self._max_waiting):
            raise OverloadedError(f"{own:,} {self._things} of this client wait already")
