"""What a step changes on the device before its rows are computed: page tables, slots, and proposed
tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.engine.step_plan import Chunk, PageWrite, SlotLoad, StepPlan
from runtime.kv.pool import PagePool
from runtime.worker.logit_biases import LoadedBiases, rows_of
from runtime.worker.mirostat import LoadedMirostats, mirostat_row
from runtime.worker.pinned_buffer import PinnedBuffer
from runtime.worker.repetition import LoadedRepetitions
from runtime.worker.restrictions import LoadedRestrictions, restriction_rows
from runtime.worker.sampler import LoadedSlots, ProposedTokens, Sampler
from runtime.worker.sampler_chain import LoadedChains, chain_rows

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
        _write_loads(buffer, plan.slot_loads, sampler) if plan.slot_loads else None,
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


def _write_loads(buffer: PinnedBuffer, loads: Sequence[SlotLoad], sampler: Sampler) -> LoadedSlots:
    assert all(len(load.tokens) <= sampler.context_tokens for load in loads)
    floats, ints = sampler.parameter_rows([load.sampling for load in loads])
    return LoadedSlots(
        tuple((load.slot, buffer.put(load.tokens, _INT32)) for load in loads),
        buffer.put([load.slot for load in loads], _INT64),
        buffer.put(floats, torch.float32),
        buffer.put(ints, _INT64),
        _write_biases(buffer, [load for load in loads if load.sampling.biased]),
        _write_chains(buffer, [load for load in loads if load.sampling.chained]),
        _write_repetitions(buffer, [load for load in loads if load.sampling.repetitive], sampler),
        _write_restrictions(buffer, [load for load in loads if load.sampling.restricted], sampler),
        _write_mirostats(buffer, [load for load in loads if load.sampling.adaptive]),
    )


def _write_biases(buffer: PinnedBuffer, loads: Sequence[SlotLoad]) -> LoadedBiases | None:
    if not loads:
        return None
    tokens, values, untils = rows_of([load.sampling for load in loads])
    return LoadedBiases(
        buffer.put([load.slot for load in loads], _INT64),
        buffer.put(tokens, _INT32),
        buffer.put(values, torch.float32),
        buffer.put(untils, _INT32),
    )


def _write_chains(buffer: PinnedBuffer, loads: Sequence[SlotLoad]) -> LoadedChains | None:
    if not loads:
        return None
    return LoadedChains(
        buffer.put([load.slot for load in loads], _INT64),
        buffer.put(chain_rows([load.sampling for load in loads]), torch.float32),
    )


def _write_repetitions(
    buffer: PinnedBuffer, loads: Sequence[SlotLoad], sampler: Sampler
) -> LoadedRepetitions | None:
    if not loads:
        return None
    floats, ints, words = sampler.repetition_rows([load.sampling for load in loads])
    return LoadedRepetitions(
        buffer.put([load.slot for load in loads], _INT64),
        buffer.put(floats, torch.float32),
        buffer.put(ints, _INT64),
        buffer.put(words, _INT32),
    )


def _write_restrictions(
    buffer: PinnedBuffer, loads: Sequence[SlotLoad], sampler: Sampler
) -> LoadedRestrictions | None:
    if not loads:
        return None
    sampling = [load.sampling for load in loads]
    words, allowed = restriction_rows(sampling, sampler.vocab_size)
    return LoadedRestrictions(
        buffer.put([load.slot for load in loads], _INT64),
        buffer.put([params.words_from for params in sampling], _INT64),
        buffer.put(words, _INT32),
        buffer.put(allowed, _INT32),
    )


def _write_mirostats(buffer: PinnedBuffer, loads: Sequence[SlotLoad]) -> LoadedMirostats | None:
    if not loads:
        return None
    return LoadedMirostats(
        buffer.put([load.slot for load in loads], _INT64),
        buffer.put(
            [mirostat_row(load.sampling, load.mirostat_mu) for load in loads], torch.float32
        ),
    )
