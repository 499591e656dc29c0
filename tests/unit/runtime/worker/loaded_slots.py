"""Samplers whose slots are filled as by a step's plan."""

from collections.abc import Sequence

from runtime.engine.request import SamplingParams
from runtime.engine.step_plan import SlotLoad
from runtime.worker.pinned_buffer import PinnedBuffer
from runtime.worker.sampler import Sampler
from runtime.worker.step_changes import write_loads


def load_slots(
    sampler: Sampler,
    sampling: Sequence[SamplingParams],
    *,
    tokens: Sequence[Sequence[int]] = (),
) -> None:
    """Slot r gets the r-th parameters and, if given, the r-th tokens."""
    loads = [
        SlotLoad(slot, tuple(tokens[slot]) if tokens else (), params)
        for slot, params in enumerate(sampling)
    ]
    sampler.load(write_loads(PinnedBuffer(1 << 22, None), loads, sampler))
