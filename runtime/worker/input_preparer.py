"""From a step's plan to tensors on the device, through two buffers made once.

Everything a step uploads lies in one run of 32-bit words and travels in one copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from runtime.engine.request import SamplingParams
from runtime.engine.scheduler import Chunk, SlotLoad, StepPlan
from runtime.kv.pool import PagePool
from runtime.kv.spec import CacheKind, CacheLayout
from runtime.vision.image_rows import AXES, FeatureRows, places, plan_insertions
from runtime.worker.model import ImageWrite, RowSpan
from runtime.worker.pinned_buffer import PinnedBuffer
from runtime.worker.pooling import PooledStep, plan_pooling
from runtime.worker.sampler import FLOATS, INTS, Draws, Path, Sampler, path_of

_WORDS_PER_LOAD = 1 + FLOATS + 2 * INTS  # the slot, its float and its int64 parameters


@dataclass(frozen=True, slots=True)
class Loads:
    """Slots to fill before the step: their tokens [n] int32 one by one, parameters together."""

    tokens: tuple[tuple[int, Tensor], ...]
    slots: Tensor
    floats: Tensor
    ints: Tensor


@dataclass(frozen=True, slots=True)
class DeviceImages:
    """Rows of images that the step writes: slots and indices [image rows] int64, and whose.

    after_image [rows] bool: as in `AttentionPlan`.
    """

    writes: tuple[ImageWrite, ...]
    after_image: Tensor
    slots: Tensor
    indices: Tensor


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """What the rows see of one cache group: begin and end [rows] int32, and its bounds."""

    spans: tuple[RowSpan, ...]
    begin: Tensor
    end: Tensor
    images: DeviceImages | None


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """One step's upload, on the device; it stays valid until the step after next is staged.

    positions [rows] int64; row_slot [rows] int32; page_cells [n] int64, pages [n] int32.
    output_rows [draws + pooled rows] int64: first those that draw, whose chunks `drawing` names,
    then those that `pooled` takes. image_rows [n] int64: rows of `images`, one after the other.
    axes [3, rows] int64: as in `Batch`.
    """

    positions: Tensor
    axes: Tensor | None
    row_slot: Tensor
    image_rows: Tensor
    images: tuple[FeatureRows, ...]
    groups: tuple[DeviceGroup, ...]
    output_rows: Tensor
    draws: Draws
    drawing: tuple[int, ...]
    pooled: PooledStep
    page_cells: Tensor
    pages: Tensor
    loads: Loads | None


class InputPreparer:
    """Writes plans into host buffers (pinned for CUDA) by turns and uploads them."""

    def __init__(
        self,
        layout: CacheLayout,
        pool: PagePool,
        sampler: Sampler,
        *,
        slots: int,
        step_tokens: int,
        context_tokens: int,
        device: torch.device,
        position_axes: int = 1,
    ) -> None:
        assert position_axes in (1, AXES)
        self._kinds = layout.kinds
        self._broadcast = position_axes == AXES
        self._pool = pool
        self._sampler = sampler
        self._context_tokens = context_tokens
        words = buffer_words(
            layout, slots=slots, step_tokens=step_tokens, context_tokens=context_tokens
        )
        self._pinned_buffers = [PinnedBuffer(words, device) for _ in range(2)]
        self._device_words = (
            torch.empty(words, dtype=torch.int32, device=device) if device.type == "cuda" else None
        )

    def stage(self, plan: StepPlan) -> DeviceInputs:
        """Write and upload one plan. Waits only if the upload before last is still under way."""
        self._pinned_buffers.reverse()
        pinned = self._pinned_buffers[0]
        pinned.clear()
        rows = _row_spans(plan.chunks)
        positions, slots = self._write_rows(pinned, plan.chunks, rows)
        axes = _write_axes(pinned, plan.chunks, rows) if self._broadcast else None
        insertions = plan_insertions(plan.chunks, rows)
        image_rows = pinned.put(insertions.rows)
        groups = [_write_group(pinned, kind, plan.chunks, rows) for kind in self._kinds]
        drawing, pooled = self._drawing_order(plan.chunks), plan_pooling(plan.chunks, rows)
        outputs = self._write_outputs(pinned, plan.chunks, rows, drawing)
        pooled_rows = pinned.put(pooled.rows)
        tables = self._write_pages(pinned, plan)
        loads = self._write_loads(pinned, plan.slot_loads) if plan.slot_loads else None
        words = pinned.upload(self._device_words)
        return DeviceInputs(
            words[positions].long(),
            None if axes is None else words[axes].long().view(AXES, -1),
            words[slots],
            words[image_rows].long(),
            insertions.parts,
            tuple(group.on(words) for group in groups),
            torch.cat([words[outputs.rows], words[pooled_rows]]).long(),
            outputs.draws(words),
            drawing,
            pooled,
            words[tables[0]].long(),
            words[tables[1]],
            loads.on(words) if loads else None,
        )

    def _write_rows(
        self, pinned: PinnedBuffer, chunks: Sequence[Chunk], rows: Sequence[RowSpan]
    ) -> tuple[slice, slice]:
        positions, slots = pinned.take(rows[-1].end), pinned.take(rows[-1].end)
        for chunk, span in zip(chunks, rows, strict=True):
            end = chunk.start + chunk.length
            pinned.array[positions][span.begin : span.end] = np.arange(chunk.start, end)
            pinned.array[slots][span.begin : span.end] = chunk.slot
        return positions, slots

    def _drawing_order(self, chunks: Sequence[Chunk]) -> tuple[int, ...]:
        """The chunks that draw, those of one path together."""
        vocab = self._sampler.vocab_size
        keyed = [
            (path_of(chunk.sequence.request.sampling, vocab), index)
            for index, chunk in enumerate(chunks)
            if chunk.samples and chunk.sequence.request.pooling is None
        ]
        return tuple(index for _, index in sorted(keyed))

    def _write_outputs(
        self,
        pinned: PinnedBuffer,
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
            rows=pinned.put([spans[index].end - 1 for index in drawing]),
            slots=pinned.put([chunk.slot for chunk in drawn]),
            positions=pinned.put(ends),
            counts=tuple(paths.count(path) for path in Path),
            width=max(
                (s.top_k for s, p in zip(params, paths, strict=True) if p is Path.TOP), default=0
            ),
            penalised=pinned.put(penalised),
            window=max(windows, default=0),
            scored=pinned.put(scored),
            alternatives=max((params[row].logprobs or 0 for row in scored), default=0),
        )

    def _write_pages(self, pinned: PinnedBuffer, plan: StepPlan) -> tuple[slice, slice]:
        cell = self._pool.table_cell
        return (
            pinned.put([cell(write.group, write.slot, write.index) for write in plan.page_writes]),
            pinned.put([write.page for write in plan.page_writes]),
        )

    def _write_loads(self, pinned: PinnedBuffer, loads: Sequence[SlotLoad]) -> "_LoadParts":
        assert all(len(load.tokens) <= self._context_tokens for load in loads)
        floats, ints = self._sampler.parameter_rows([load.sampling for load in loads])
        return _LoadParts(
            count=len(loads),
            tokens=tuple((load.slot, pinned.put(load.tokens)) for load in loads),
            slots=pinned.put([load.slot for load in loads]),
            floats=pinned.put(np.asarray(floats, np.float32).ravel().view(np.int32)),
            ints=pinned.put(np.asarray(ints, np.int64).ravel().view(np.int32), aligned=True),
        )


def buffer_words(layout: CacheLayout, *, slots: int, step_tokens: int, context_tokens: int) -> int:
    """32-bit words that the largest plan takes."""
    by_image = sum(kind.by_image for kind in layout.kinds)
    rows = step_tokens * (3 + AXES + 2 * len(layout.groups) + by_image)
    images = 2 * by_image * layout.image_rows
    outputs = slots * 5 + step_tokens
    tables = 2 * slots * sum(layout.held_pages(context_tokens, step_tokens))
    loads = slots * (_WORDS_PER_LOAD + context_tokens) + 1
    return rows + images + outputs + tables + loads


@dataclass(frozen=True, slots=True)
class _ImageParts:
    """Where the rows of images lie in the words, and which rows come behind an image."""

    writes: tuple[ImageWrite, ...]
    after: slice
    slots: slice
    indices: slice

    def on(self, words: Tensor) -> DeviceImages:
        return DeviceImages(
            self.writes,
            words[self.after].bool(),
            words[self.slots].long(),
            words[self.indices].long(),
        )


@dataclass(frozen=True, slots=True)
class _GroupParts:
    """Where it lies in the words what the rows see of a group."""

    spans: tuple[RowSpan, ...]
    begin: slice
    end: slice
    images: _ImageParts | None

    def on(self, words: Tensor) -> DeviceGroup:
        images = self.images.on(words) if self.images else None
        return DeviceGroup(self.spans, words[self.begin], words[self.end], images)


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


def _lookback(sampling: SamplingParams, end: int) -> int:
    """How many positions before `end` the penalties look at."""
    begin = 0 if sampling.repeat_penalty != 1.0 else sampling.counted_from
    within = max(0, end - begin)
    return within if sampling.repeat_last_n is None else min(sampling.repeat_last_n, within)


def _row_spans(chunks: Sequence[Chunk]) -> list[RowSpan]:
    ends = list(accumulate(chunk.length for chunk in chunks))
    return [
        RowSpan(end - chunk.length, end, chunk.slot, chunk.start)
        for chunk, end in zip(chunks, ends, strict=True)
    ]


def _write_axes(pinned: PinnedBuffer, chunks: Sequence[Chunk], rows: Sequence[RowSpan]) -> slice:
    axes = pinned.take(AXES * rows[-1].end)
    written = pinned.array[axes].reshape(AXES, -1)
    for chunk, span in zip(chunks, rows, strict=True):
        end = chunk.start + chunk.length
        written[:, span.begin : span.end] = places(chunk.sequence.spans, chunk.start, end)
    return axes


def _write_group(
    pinned: PinnedBuffer, kind: CacheKind, chunks: Sequence[Chunk], rows: Sequence[RowSpan]
) -> "_GroupParts":
    count = rows[-1].end
    begin, end = pinned.take(count), pinned.take(count)
    spans = []
    for chunk, span in zip(chunks, rows, strict=True):
        stop = chunk.start + chunk.length
        begins, ends = kind.seen(chunk.start, stop, chunk.sequence.spans)
        pinned.array[begin][span.begin : span.end] = begins
        pinned.array[end][span.begin : span.end] = ends
        spans.append(replace(span, seen_begin=min(begins), seen_end=max(ends)))
    images = _write_images(pinned, kind, chunks, rows) if kind.by_image else None
    return _GroupParts(tuple(spans), begin, end, images)


def _write_images(
    pinned: PinnedBuffer, kind: CacheKind, chunks: Sequence[Chunk], rows: Sequence[RowSpan]
) -> "_ImageParts":
    after = pinned.take(rows[-1].end)
    writes: list[ImageWrite] = []
    slots: list[int] = []
    indices: list[int] = []
    for chunk, span in zip(chunks, rows, strict=True):
        images, stop = chunk.sequence.spans, chunk.start + chunk.length
        first = min((image.start for image in images if image.cross_rows), default=stop)
        seeing = pinned.array[after][span.begin : span.end]
        seeing[:] = 1
        seeing[: max(0, first - chunk.start)] = 0
        for place in kind.begun(chunk.start, stop, images):
            begin = len(indices)
            indices += [*place.rows, *place.padding]
            slots += [chunk.slot] * (len(indices) - begin)
            writes.append(ImageWrite(place.image.digest, begin, len(indices)))
    return _ImageParts(tuple(writes), after, pinned.put(slots), pinned.put(indices))
