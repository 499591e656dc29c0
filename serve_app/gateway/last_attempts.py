"""Tasks whose next loss would end them run one at a time, so that a harmful one ends alone."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from weakref import WeakValueDictionary

from serve_app.fair_gate import FairGate
from serve_app.gateway.failover import FailoverState

# A task whose client does not read a delta for this long does not hold up the others any more.
UNREAD_S = 10.0


class LastAttempts:
    """The order of last attempts, which is separate for each model. For one event loop."""

    def __init__(self) -> None:
        self._gates: WeakValueDictionary[str, FairGate] = WeakValueDictionary()

    @asynccontextmanager
    async def place(self, failover: FailoverState) -> AsyncIterator["AttemptPlace"]:
        """A context for one attempt. If it is the last one, it waits until no other task of the
        model is in its last attempt without progress."""
        with ExitStack() as held:
            if failover.on_last_attempt:
                gate = self._gates.setdefault(failover.model, FairGate(1))
                tenant = failover.task.tenant
                await gate.enter(tenant)
                held.callback(gate.leave, tenant)
            yield AttemptPlace(failover, held)


class AttemptPlace:
    """An attempt, and its place among last attempts while it has one."""

    def __init__(self, failover: FailoverState, held: ExitStack) -> None:
        self._failover = failover
        self._held = held

    @contextmanager
    def delivery(self) -> Iterator[None]:
        """A context in which the client takes the latest delta. Gives the place back if the replica
        has made progress, or after UNREAD_S."""
        if self._failover.progressed:
            self._held.close()
        if not self._failover.on_last_attempt:
            yield
            return
        unread = asyncio.get_running_loop().call_later(UNREAD_S, self._held.close)
        try:
            yield
        finally:
            unread.cancel()
