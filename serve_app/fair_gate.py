"""A semaphore that admits waiting callers by turns over their tenants."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

from runtime.engine.fairness import FairQueue, may_enter
from runtime.errors import OverloadedError


class FairGate:
    """At most `places` holders at a time; the others are admitted in the order of `FairQueue`.

    `tenant_places`: limit of the places that one tenant holds, even while others are free, because
    a holder does not leave early for those who come later. By default all of them.
    `max_waiting`: limit of waiting callers, of which one tenant may hold only a share
    (`may_enter`); None: no limit. `things`: the noun for callers in error messages. For one event
    loop.
    """

    def __init__(
        self,
        places: int,
        *,
        tenant_places: int | None = None,
        max_waiting: int | None = None,
        things: str = "requests",
    ) -> None:
        assert places > 0
        self._places = places
        self._tenant_places = places if tenant_places is None else tenant_places
        self._max_waiting = max_waiting
        self._things = things
        self._holders: Counter[str] = Counter()
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    @property
    def count(self) -> int:
        """Number of holders and waiting callers."""
        return self._holders.total() + len(self._waiting)

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        await self.enter(tenant)
        try:
            yield
        finally:
            self.leave(tenant)

    async def enter(self, tenant: str, *, limited: bool = True) -> None:
        """Waits for a place, which `leave` gives back. Raises OverloadedError if too many wait and
        the caller is `limited`."""
        if self._holders.total() < self._places and self._may_hold(tenant):
            self._holders[tenant] += 1
            return
        if limited:
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

    def leave_after(self, work: Future[Any], tenant: str) -> None:
        """Calls `leave` when `work` on a thread ends, which cannot be stopped: a caller that is
        cancelled keeps its place until then."""
        loop = asyncio.get_running_loop()
        work.add_done_callback(lambda _: loop.call_soon_threadsafe(self.leave, tenant))

    def leave(self, tenant: str) -> None:
        self._holders[tenant] -= 1
        if not self._holders[tenant]:
            del self._holders[tenant]
        for waiting, turn in self._waiting.in_turn(self._holders):
            # A turn that is done is cancelled, and its caller has not run since.
            if not turn.done() and self._may_hold(waiting):
                self._waiting.serve(waiting, turn)
                self._holders[waiting] += 1
                turn.set_result(None)
                return

    def _may_hold(self, tenant: str) -> bool:
        return self._holders[tenant] < self._tenant_places

    def _check_room(self, tenant: str) -> None:
        if self._max_waiting is None:
            return
        own, total = self._waiting.count(tenant), len(self._waiting)
        if total >= self._max_waiting:
            raise OverloadedError(f"{self.count:,} {self._things} are running or waiting already")
        if not may_enter(own, total, self._max_waiting):
            raise OverloadedError(f"{own:,} {self._things} of this client are waiting already")
