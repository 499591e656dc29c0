"""Python's garbage collector while a process starts."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """For imports and loading, whose many objects all live on: a fifth of the time of importing
    torch is spent in collections."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
