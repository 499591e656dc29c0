"""Work on large request bodies, in a thread and at a limited rate."""

import asyncio
import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from serve_app.fair_gate import FairGate

# By default a thread that runs Python code keeps the GIL for 5 ms, and the event loop waits for the
# GIL several times in each iteration, once for each socket that it reads.
SWITCH_INTERVAL_S = 0.0005
# A collection of the oldest generation visits the objects of all requests and holds the GIL. By
# default one begins after fewer new objects than a single large body can have.
GC_THRESHOLDS = 5_000, 10, 20

Result = TypeVar("Result")


class LargeBodies:
    """Runs pieces of work one at a time in one thread; new bodies by turns over tenants.

    More threads would not help, because each call into C holds the GIL. After a piece of work the
    thread pauses for as long as the work took, so that for at least half of the time the event loop
    does not compete for the GIL. Time is the event loop's clock.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bodies")
        self._turns = FairGate(1)
        self._pauses_until_s = 0.0

    async def begin(self, tenant: str, work: Callable[[], Result]) -> Result:
        """Runs the first piece of work on a body when its turn has come."""
        await self._turns.enter(tenant)
        try:
            return await self.proceed(work)
        finally:
            self._leave(tenant)

    async def proceed(self, work: Callable[[], Result]) -> Result:
        """Runs a further piece of a begun body before all new bodies, so that few bodies are in
        memory at a time."""
        loop = asyncio.get_running_loop()

        def timed() -> Result:
            begun_s = loop.time()
            try:
                return work()
            finally:
                took_s = loop.time() - begun_s
                self._pauses_until_s = max(self._pauses_until_s, begun_s) + 2 * took_s

        return await loop.run_in_executor(self._thread, timed)

    def _leave(self, tenant: str) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() < self._pauses_until_s:
            loop.call_at(self._pauses_until_s, self._leave, tenant)
        else:
            self._turns.leave(tenant)


def configure_process() -> None:
    """Sets the switch interval and the garbage collector of this process so that work on large
    bodies delays its event loop less."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*GC_THRESHOLDS)
