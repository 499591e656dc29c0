"""Limits of processor time and memory that the kernel enforces on this process."""

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from model_zoo.chat.sandbox.frames import Limits


def address_space_bytes() -> int:
    """How much address space this process has mapped."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")


@contextmanager
def limited(limits: Limits, *, idle_bytes: int) -> Iterator[None]:
    """Within it the process is killed when its time is up, and gets no more than its memory.

    A single call into C can be long and uninterruptible, so the time is a timer of the kernel
    with the signal's default action. `idle_bytes`: the address space that is not counted. Memory
    beyond the limit is a MemoryError.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    allowed = idle_bytes + limits.memory_bytes
    if hard != resource.RLIM_INFINITY:
        allowed = min(allowed, hard)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))
    signal.setitimer(signal.ITIMER_PROF, limits.seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def accept_limits() -> None:
    """Restores what a parent may have changed: the signal of the timer must end this process."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent decides
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
