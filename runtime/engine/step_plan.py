"""What one step of the device computes, as the scheduler plans it and the runner executes it."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from runtime.engine.request import Result, SamplingParams
from runtime.engine.sequence import NO_ROWS, Sequence
from runtime.kv.page_group import KeyShift, PageCopy


@dataclass(frozen=True, slots=True)
class PageWrite:
    """Entry `index` of the slot's page table in `group` becomes `page`."""

    group: int
    slot: int
    index: int
    page: int


@dataclass(frozen=True, slots=True)
class SlotLoad:
    """A sequence enters a slot: its tokens so far, from position 0, and its sampling parameters."""

    slot: int
    tokens: tuple[int, ...]
    sampling: SamplingParams


class Chunk(NamedTuple):  # faster to create than a dataclass; each step creates one per sequence
    """Positions [start, start + length) of one sequence in one step.

    `known`: their token ids. If `feedback`, `known` is empty and the chunk is one position long:
    its token is the slot's last sampled one, which only the device knows so far. `samples`: the
    last row samples the token at position start + length. `scores`: positions whose rows score the
    next token of the prompt. `proposed`: the chunk is one position long, follows another one of the
    sequence in this step, and its known token is only proposed (runtime/engine/speculation.py). It
    samples; its result counts only if the proposed token is accepted.
    """

    sequence: Sequence
    epoch: int
    slot: int
    start: int
    length: int
    known: tuple[int, ...]
    feedback: bool
    samples: bool
    scores: range = NO_ROWS
    proposed: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of the device: page table entries, slots to load, and rows to compute.

    `page_copies` are made in order, after those of earlier steps and before the rows are computed;
    `key_shifts` follow them. `proposals`: chunks whose known tokens must first be written to their
    slots, because no earlier step has sampled them; includes the `proposed` ones of `chunks`.
    """

    chunks: tuple[Chunk, ...]
    page_writes: tuple[PageWrite, ...]
    slot_loads: tuple[SlotLoad, ...]
    page_copies: tuple[PageCopy, ...] = ()
    proposals: tuple[Chunk, ...] = ()
    key_shifts: tuple[KeyShift, ...] = ()


class Runner(Protocol):
    """Executes plans on the device, in launch order; `collect` waits for one of them.

    Results are aligned with the plan's chunks.
    """

    def launch(self, plan: StepPlan) -> Any: ...

    def collect(self, launched: Any) -> tuple[Result, ...]: ...
