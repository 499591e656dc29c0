"""Measures what a process keeps from round to round: memory, blocks and objects of Python."""

import ctypes
import gc
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Held:
    """`resident_bytes`: without what is free in the heaps of C. `blocks`: allocated by Python.
    `objects`: those that the garbage collector knows."""

    resident_bytes: float
    blocks: float
    objects: float


# Of a round with some 30 requests and two engines: less than one block or object per request. Freed
# memory stays resident beside what is in use in the same page, which varies by a MiB or two.
MOST_PER_ROUND = Held(resident_bytes=64 * 2**10, blocks=16, objects=8)
FEWEST = 24  # measurements: resident memory of eight grew by 0.65 MiB a round without a leak


def held_now() -> Held:
    """What this process holds, after a full collection."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(pages * resource.getpagesize(), sys.getallocatedblocks(), len(gc.get_objects()))


def growth(measured: Sequence[Held]) -> Held:
    """Per round: the median growth between two rounds that are half of `measured` apart.

    One large round does not change the median, and what grows once, as a cache that is filled, is
    divided by the rounds.
    """
    apart = len(measured) // 2
    found = {}
    for each in fields(Held):
        values = [getattr(held, each.name) for held in measured]
        pairs = zip(values, values[apart:], strict=False)
        found[each.name] = median((late - early) / apart for early, late in pairs)
    return Held(**found)


def check_growth(measured: Sequence[Held]) -> None:
    """AssertionError: something is leaked. Too few measurements show nothing, and are an error."""
    assert len(measured) >= FEWEST, f"{len(measured)} rounds are too few to find a leak"
    found = growth(measured)
    for each in fields(Held):
        grown, most = getattr(found, each.name), getattr(MOST_PER_ROUND, each.name)
        assert grown <= most, f"{each.name} grew by {grown:,.1f} per round; {most:,} are allowed"
