"""Time in tests: limits that only a hang reaches, and a clock that stands while the machine does.

A machine may be busy with other work, so a second may pass between any two lines of a test. What
must happen is awaited for up to `HANG_S`. What a test gives little time, such as a peer that falls
silent, is timed by `PatientLoop`.
"""

import asyncio
import selectors
import time
from collections.abc import Callable
from selectors import SelectorKey

# No test takes so long unless it waits for what never happens.
HANG_S = 600.0
# How much time one turn of the event loop counts for at most.
_TURN_S = 0.01


class PatientLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock a stall does not advance: each turn of the loop counts for 10 ms at
    most. So timers and I/O come in the same order on a slow machine as on a fast one."""

    def __init__(self) -> None:
        super().__init__(_Turns())
        self._clock_s = self._read_s = time.monotonic()

    def time(self) -> float:
        now = time.monotonic()
        self._clock_s += min(now - self._read_s, _TURN_S)
        self._read_s = now
        return self._clock_s


class _Turns(selectors.DefaultSelector):
    """Waits for one turn at most, so that time in which nothing happens is counted whole."""

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        return super().select(_TURN_S if timeout is None else min(timeout, _TURN_S))


def wait_until(condition: Callable[[], object]) -> None:
    """Poll until the condition holds; AssertionError when it has not after `HANG_S`."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, f"not so within {HANG_S:g} s"
        time.sleep(0.01)


async def until(condition: Callable[[], object]) -> None:
    """The same on an event loop."""
    async with asyncio.timeout(HANG_S):
        while not condition():
            await asyncio.sleep(0.01)
