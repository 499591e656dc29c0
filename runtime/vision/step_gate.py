"""Pauses encoding on a CPU during the steps that delay running streams most."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepGate:
    """Closed while a step with prompts and running streams is computed, which would take up to
    twice as long while an image is encoded.

    After a pause the encoder computes for as long as it has paused, regardless of steps, so that a
    continuous load of prompts does not starve it. `clock` in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._open = threading.Event()
        self._open.set()
        self._clock = clock
        self._computes_until = 0.0

    def pause(self) -> None:
        """Wait while the gate is closed. Called on the encoder's thread."""
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
        """Close the gate inside the context. Called on the engine's thread."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()
