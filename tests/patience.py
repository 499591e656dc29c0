"""Time in tests: timeouts that only a hang reaches, and a clock that stops while the process
stalls.

On a busy machine a second may pass between any two lines of a test. Waits for events end after
`HANG_S`. Short timeouts under test, such as that of a silent peer, run on `PatientLoop`.
"""

import asyncio
import inspect
import selectors
import time
from collections.abc import Callable
from selectors import SelectorKey

# No test takes so long unless it waits for something that never happens.
HANG_S = 600.0
# The most by which one turn of the event loop advances its clock.
_TURN_S = 0.01
# So many turns without an event end `settled`: a packet on loopback may be late by one.
_QUIET_TURNS = 3


class PatientLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock advances by at most 10 ms per turn of the loop, so that timers and
    I/O come in the same order on a slow machine as on a fast one."""

    def __init__(self) -> None:
        self.turns = _Turns()
        super().__init__(self.turns)
        self._clock_s = self._read_s = time.monotonic()

    def time(self) -> float:
        now = time.monotonic()
        self._clock_s += min(now - self._read_s, _TURN_S)
        self._read_s = now
        return self._clock_s

    def advance(self, seconds: float) -> None:
        """Move the clock forward; timers that are due run in the next turn."""
        self._clock_s += seconds


class _Turns(selectors.DefaultSelector):
    """Waits for one turn at most, so that idle time is counted in full.

    `quiet`: the latest turns that waited and saw no event of a socket or thread.
    """

    quiet = 0

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        events = super().select(_TURN_S if timeout is None else min(timeout, _TURN_S))
        if events:
            self.quiet = 0
        elif timeout is None or timeout > 0:
            self.quiet += 1
        return events


def wait_until(condition: Callable[[], object]) -> None:
    """Poll until the condition holds; AssertionError after `HANG_S`."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not hold within {HANG_S:g} s"
        time.sleep(0.01)


async def until(condition: Callable[[], object]) -> None:
    """The same on an event loop; the condition may be a coroutine function."""
    async with asyncio.timeout(HANG_S):
        while not (await holds if inspect.iscoroutine(holds := condition()) else holds):
            await asyncio.sleep(0.01)


async def settled() -> None:
    """Returns once the event loop has nothing to do but to wait, before a test checks that
    something has not happened."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, PatientLoop)
    loop.turns.quiet = 0
    while loop.turns.quiet < _QUIET_TURNS:
        await asyncio.sleep(_TURN_S)


async def pass_time(seconds: float) -> None:
    """Lets so much time pass on the clock of the event loop, without waiting for it."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, PatientLoop)
    loop.advance(seconds)
    await settled()
