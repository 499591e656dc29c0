"""Time that tests set, and event loops whose time passes only while every task waits."""

import asyncio
import selectors
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any


@dataclass
class Clock:
    """Returns `now_s`."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


class _Skipping(selectors.DefaultSelector):
    """Advances a clock instead of waiting for a timer."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if not events and timeout:
            self.now_s += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on which sleeping takes no time of others."""

    def __init__(self) -> None:
        self._timers = _Skipping()
        super().__init__(self._timers)

    def time(self) -> float:
        return self._timers.now_s

    def skip(self, seconds: float) -> None:
        """Advance the clock, as if the caller had been busy for so long."""
        self._timers.now_s += seconds


def in_virtual_time(
    work: Coroutine[Any, Any, Any], *, loop_factory: type[VirtualLoop] = VirtualLoop
) -> Any:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(work)
