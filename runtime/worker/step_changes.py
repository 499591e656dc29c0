"""What a step changes on the device before its rows are computed: page tables, slots, and proposed
tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.engine.step_plan import Chunk, PageWrite, SlotLoad, StepPlan
from runtime.kv.pool import PagePool
from runtime.worker.pinned_buffer import PinnedBuffer
from runtime.worker.sampler import LoadedSlots, ProposedTokens, Sampler
from runtime.worker.slot_table import LoadedRows, TableSpec

_INT32, _INT64 = torch.int32, torch.int64


@dataclass(frozen=True, slots=True)
class WrittenPages:
    """Cells [n] int64 of the page tables, and the pages [n] int32 that are written to them."""

    cells: Tensor
    pages: Tensor


@dataclass(frozen=True, slots=True)
class DeviceChanges:
    """The changes of a step, on the device; None where there are none. Valid until the next step is
    prepared."""

    pages: WrittenPages | None
    loads: LoadedSlots | None
    proposed: ProposedTokens | None


def write_changes(
    buffer: PinnedBuffer, plan: StepPlan, pool: PagePool, sampler: Sampler
) -> DeviceChanges:
    """Write the changes of a plan to the buffer, whose `upload` makes them valid."""
    return DeviceChanges(
        _write_pages(buffer, plan.page_writes, pool) if plan.page_writes else None,
        write_loads(buffer, plan.slot_loads, sampler) if plan.slot_loads else None,
        _write_proposals(buffer, plan.proposals) if plan.proposals else None,
    )


def _write_pages(buffer: PinnedBuffer, writes: Sequence[PageWrite], pool: PagePool) -> WrittenPages:
    return WrittenPages(
        buffer.put([pool.table_cell(w.group, w.slot, w.index) for w in writes], _INT64),
        buffer.put([write.page for write in writes], _INT32),
    )


def _write_proposals(buffer: PinnedBuffer, chunks: Sequence[Chunk]) -> ProposedTokens:
    return ProposedTokens(
        buffer.put([chunk.slot for chunk in chunks for _ in chunk.known], _INT64),
        buffer.put([chunk.start + n for chunk in chunks for n in range(len(chunk.known))], _INT64),
        buffer.put([token for chunk in chunks for token in chunk.known], _INT32),
    )


def write_loads(buffer: PinnedBuffer, loads: Sequence[SlotLoad], sampler: Sampler) -> LoadedSlots:
    """Tokens and parameters of sequences that enter slots; valid as those of `write_changes`."""
    assert all(len(load.tokens) <= sampler.context_tokens for load in loads)
    return LoadedSlots(
        tuple((load.slot, buffer.put(load.tokens, _INT32)) for load in loads),
        tuple(_write_table(buffer, loads, table.spec) for table in sampler.tables),
    )


def _write_table(
    buffer: PinnedBuffer, loads: Sequence[SlotLoad], spec: TableSpec
) -> LoadedRows | None:
    loads = [load for load in loads if spec.used_by(load.sampling)]
    if not loads:
        return None
    arrays = zip(spec.rows(loads), spec.columns, strict=True)
    return LoadedRows(
        buffer.put([load.slot for load in loads], _INT64),
        tuple(buffer.put(values, column.dtype) for values, column in arrays),
    )
