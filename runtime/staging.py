"""From a step's plan to tensors on the device, through two buffers made once.

Everything a step uploads lies in one run of 32-bit words and travels in one copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.kv.pool import KVPool
from runtime.kv.spec import CacheKind, CacheLayout
from runtime.model import RowSpan
from runtime.request import SamplingParams
from runtime.sampler import FLOATS, INTS, Draws, Path, Sampler, path_of
from runtime.scheduler import Chunk, SlotLoad, StepPlan

_WORDS_PER_LOAD = 1 + FLOATS + 2 * INTS  # the slot, its float and its int64 parameters


@dataclass(frozen=True, slots=True)
class Loads:
    """Slots to fill before the step: their tokens [n] int32 one by one, parameters together."""

    tokens: tuple[tuple[int, Tensor], ...]
    slots: Tensor
    floats: Tensor
    ints: Tensor


@dataclass(frozen=True, slots=True)
class Staged:
    """One step's upload, on the device; it stays valid until the step after next is staged.

    positions [rows] int64; row_slot [rows] int32; visible: begin and end [rows] int32 per cache
    group; output_rows [draws] int64; page_cells [n] int64, pages [n] int32. `drawing` names the
    chunk of each output row.
    """

    spans: tuple[RowSpan, ...]
    positions: Tensor
    row_slot: Tensor
    visible: tuple[tuple[Tensor, Tensor], ...]
    output_rows: Tensor
    draws: Draws
    drawing: tuple[int, ...]
    page_cells: Tensor
    pages: Tensor
    loads: Loads | None


class Stage:
    """Writes plans into host buffers (pinned for CUDA) by turns and uploads them."""

    def __init__(
        self,
        layout: CacheLayout,
        pool: KVPool,
        sampler: Sampler,
        *,
        slots: int,
        step_tokens: int,
        context_tokens: int,
        device: torch.device,
    ) -> None:
        self._kinds = [group.cache.kind for group in layout.groups]
        self._pool = pool
        self._sampler = sampler
        self._context_tokens = context_tokens
        words = buffer_words(
            layout, slots=slots, step_tokens=step_tokens, context_tokens=context_tokens
        )
        self._sheets = [_Sheet(words, device) for _ in range(2)]
        self._device_words = (
            torch.empty(words, dtype=torch.int32, device=device) if device.type == "cuda" else None
        )

    def stage(self, plan: StepPlan) -> Staged:
        """Write and upload one plan. Waits only if the upload before last is still under way."""
        self._sheets.reverse()
        sheet = self._sheets[0]
        sheet.clear()
        spans, rows = self._write_rows(sheet, plan.chunks)
        drawing = self._drawing_order(plan.chunks)
        outputs = self._write_outputs(sheet, plan.chunks, spans, drawing)
        tables = self._write_pages(sheet, plan)
        loads = self._write_loads(sheet, plan.slot_loads) if plan.slot_loads else None
        words = sheet.upload(self._device_words)
        positions, row_slot, *visible = (words[part] for part in rows)
        return Staged(
            spans,
            positions.long(),
            row_slot,
            tuple(zip(visible[::2], visible[1::2], strict=True)),
            words[outputs.rows].long(),
            outputs.draws(words),
            drawing,
            words[tables[0]].long(),
            words[tables[1]],
            loads.on(words) if loads else None,
        )

    def _write_rows(
        self, sheet: "_Sheet", chunks: Sequence[Chunk]
    ) -> tuple[tuple[RowSpan, ...], list[slice]]:
        count = sum(chunk.length for chunk in chunks)
        parts = [sheet.take(count) for _ in range(2 + 2 * len(self._kinds))]
        positions, slots, *visible = (sheet.array[part] for part in parts)
        spans, row = [], 0
        for chunk in chunks:
            rows = slice(row, row + chunk.length)
            positions[rows] = np.arange(chunk.start, chunk.start + chunk.length)
            slots[rows] = chunk.slot
            for kind, begin, end in zip(self._kinds, visible[::2], visible[1::2], strict=True):
                _fill_first_visible(begin[rows], kind, chunk)
                _fill_last_visible(end[rows], positions[rows], chunk)
            spans.append(RowSpan(row, row + chunk.length, chunk.slot, chunk.start))
            row += chunk.length
        return tuple(spans), parts

    def _drawing_order(self, chunks: Sequence[Chunk]) -> tuple[int, ...]:
        """The chunks that draw, those of one path together."""
        vocab = self._sampler.vocab_size
        keyed = [
            (path_of(chunk.sequence.request.sampling, vocab), index)
            for index, chunk in enumerate(chunks)
            if chunk.samples
        ]
        return tuple(index for _, index in sorted(keyed))

    def _write_outputs(
        self,
        sheet: "_Sheet",
        chunks: Sequence[Chunk],
        spans: Sequence[RowSpan],
        drawing: Sequence[int],
    ) -> "_Outputs":
        drawn = [chunks[index] for index in drawing]
        params = [chunk.sequence.request.sampling for chunk in drawn]
        ends = [chunk.start + chunk.length for chunk in drawn]
        paths = [path_of(s, self._sampler.vocab_size) for s in params]
        penalised = [row for row, s in enumerate(params) if s.penalised]
        windows = [_lookback(params[row], ends[row]) for row in penalised]
        scored = [row for row, s in enumerate(params) if s.logprobs is not None]
        return _Outputs(
            rows=sheet.put([spans[index].end - 1 for index in drawing]),
            slots=sheet.put([chunk.slot for chunk in drawn]),
            positions=sheet.put(ends),
            counts=tuple(paths.count(path) for path in Path),
            width=max(
                (s.top_k for s, p in zip(params, paths, strict=True) if p is Path.TOP), default=0
            ),
            penalised=sheet.put(penalised),
            window=max(windows, default=0),
            scored=sheet.put(scored),
            alternatives=max((params[row].logprobs or 0 for row in scored), default=0),
        )

    def _write_pages(self, sheet: "_Sheet", plan: StepPlan) -> tuple[slice, slice]:
        cell = self._pool.table_cell
        return (
            sheet.put([cell(write.group, write.slot, write.index) for write in plan.page_writes]),
            sheet.put([write.page for write in plan.page_writes]),
        )

    def _write_loads(self, sheet: "_Sheet", loads: Sequence[SlotLoad]) -> "_LoadParts":
        assert all(len(load.tokens) <= self._context_tokens for load in loads)
        floats, ints = self._sampler.parameter_rows([load.sampling for load in loads])
        return _LoadParts(
            count=len(loads),
            tokens=tuple((load.slot, sheet.put(load.tokens)) for load in loads),
            slots=sheet.put([load.slot for load in loads]),
            floats=sheet.put(np.asarray(floats, np.float32).ravel().view(np.int32)),
            ints=sheet.put(np.asarray(ints, np.int64).ravel().view(np.int32), aligned=True),
        )


def buffer_words(layout: CacheLayout, *, slots: int, step_tokens: int, context_tokens: int) -> int:
    """32-bit words that the largest plan takes."""
    groups = len(layout.groups)
    pages_per_sequence = -(-context_tokens // layout.page_tokens)
    rows = step_tokens * (2 + 2 * groups)
    outputs = slots * 5
    tables = 2 * groups * slots * pages_per_sequence
    loads = slots * (_WORDS_PER_LOAD + context_tokens) + 1
    return rows + outputs + tables + loads


@dataclass(frozen=True, slots=True)
class _Outputs:
    """Where the output rows and their draws lie in the words."""

    rows: slice
    slots: slice
    positions: slice
    counts: tuple[int, ...]
    width: int
    penalised: slice
    window: int
    scored: slice
    alternatives: int

    def draws(self, words: Tensor) -> Draws:
        return Draws(
            words[self.slots].long(),
            words[self.positions].long(),
            self.counts,
            self.width,
            words[self.penalised].long(),
            self.window,
            words[self.scored].long(),
            self.alternatives,
        )


@dataclass(frozen=True, slots=True)
class _LoadParts:
    """Where the slots to load lie in the words."""

    count: int
    tokens: tuple[tuple[int, slice], ...]
    slots: slice
    floats: slice
    ints: slice

    def on(self, words: Tensor) -> Loads:
        return Loads(
            tuple((slot, words[part]) for slot, part in self.tokens),
            words[self.slots].long(),
            words[self.floats].view(torch.float32).view(self.count, -1),
            words[self.ints].view(torch.int64).view(self.count, -1),
        )


class _Sheet:
    """One host buffer, filled from front to back."""

    def __init__(self, words: int, device: torch.device) -> None:
        self._words = torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.array: NDArray[np.int32] = self._words.numpy()
        self._used = 0
        self._uploaded: torch.cuda.Event | None = None

    def clear(self) -> None:
        if self._uploaded is not None:
            self._uploaded.synchronize()
        self._used = 0

    def take(self, count: int) -> slice:
        part = slice(self._used, self._used + count)
        assert part.stop <= len(self.array), "the plan is larger than any plan may be"
        self._used = part.stop
        return part

    def put(self, values: Sequence[int] | NDArray[np.int32], *, aligned: bool = False) -> slice:
        """Append; `aligned` to 64 bits."""
        if aligned:
            self._used += self._used % 2
        part = self.take(len(values))
        self.array[part] = values
        return part

    def upload(self, target: Tensor | None) -> Tensor:
        """Everything written so far, on the device; on the CPU the buffer itself."""
        if target is None:
            return self._words
        target[: self._used].copy_(self._words[: self._used], non_blocking=True)
        self._uploaded = torch.cuda.Event()
        self._uploaded.record(torch.cuda.current_stream(target.device))
        return target


def _lookback(sampling: SamplingParams, end: int) -> int:
    """How many positions before `end` the penalties look at."""
    within = max(0, end - sampling.penalty_begin)
    return within if sampling.repeat_last_n is None else min(sampling.repeat_last_n, within)


def _fill_first_visible(begin: NDArray[np.int32], kind: CacheKind, chunk: Chunk) -> None:
    first = kind.first_visible(chunk.start)
    last = kind.first_visible(chunk.start + chunk.length - 1)
    if first == last:  # it never falls, so it is the same in between
        begin[:] = first
    else:
        begin[:] = [kind.first_visible(chunk.start + row) for row in range(chunk.length)]


def _fill_last_visible(end: NDArray[np.int32], positions: NDArray[np.int32], chunk: Chunk) -> None:
    """Each row sees up to itself; rows of an image that is one whole see all of it."""
    end[:] = positions + 1
    for span in chunk.sequence.spans:
        begin_row = max(span.start - chunk.start, 0)
        end_row = min(span.end - chunk.start, chunk.length)
        if span.whole and begin_row < end_row:
            assert span.end <= chunk.start + chunk.length, "a step ends inside a whole image"
            end[begin_row:end_row] = span.end
