"""Limits of processor time and memory for this process, enforced by the kernel."""

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from model_zoo.chat.sandbox.frames import RenderLimits


def address_space_bytes() -> int:
    """Size of the address space that this process has mapped."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")


@contextmanager
def limited(limits: RenderLimits, *, idle_bytes: int) -> Iterator[None]:
    """A context in which the kernel kills this process when its time is up and limits its memory.

    The timer's signal has its default action, because Python runs no signal handler during a long
    call into C. `idle_bytes`: address space that does not count. Allocations beyond the limit raise
    MemoryError.
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
    """Resets inherited signal settings, so that the timer's signal ends this process."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
