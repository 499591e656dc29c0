"""Encoding on a processor gives way to the steps that running streams wait for longest."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepGate:
    """Closed while a step with prompts and streams is computed, which would take up to twice as
    long beside an image.

    After a pause the encoder computes for as long as it has paused, beside whatever steps there
    are, so that prompts without end do not keep it from finishing. `clock` in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._open = threading.Event()
        self._open.set()
        self._clock = clock
        self._computes_until = 0.0

    def pause(self) -> None:
        """On the encoder's thread: wait while the gate is closed."""
        if self._open.is_set():
            return
        begun = self._clock()
        if begun < self._computes_until:
            return
        self._open.wait()
        ended = self._clock()
        self._computes_until = ended + (ended - begun)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """On the engine's thread."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()
