"""From a step's plan to tensors on the device.

Everything that a step uploads is written to one host buffer and copied at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.engine.request import SamplingParams
from runtime.engine.step_plan import Chunk, StepPlan
from runtime.kv.cache_kinds import CacheKind
from runtime.kv.cache_layout import CacheLayout
from runtime.kv.pool import PagePool
from runtime.vision.image_rows import MOST_AXES, FeatureRows, Insertions, axes_of, plan_insertions
from runtime.worker.logit_biases import BiasedRows
from runtime.worker.model import ImageWrite, RowForm
from runtime.worker.pinned_buffer import ALIGNMENT, PinnedBuffer
from runtime.worker.pooling import PooledStep, plan_pooling
from runtime.worker.prompt_scores import ScoredStep, plan_scores
from runtime.worker.repetition import RepeatingRows
from runtime.worker.restrictions import RestrictedRows
from runtime.worker.sampler import (
    Draws,
    PenalisedRows,
    Sampler,
    SamplingPath,
    ScoredRows,
    sampler_specs,
)
from runtime.worker.slot_requests import SlotRequests
from runtime.worker.step_changes import DeviceChanges, write_changes
from runtime.worker.step_rows import Column, SeenIndices, StepRows

_INT32, _INT64 = torch.int32, torch.int64
_NOTHING = Insertions((), ()), ScoredStep((), ()), PooledStep((), (), ())


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step: rows of `slots` sequences with up to `context_tokens` positions each,
    `step_tokens` rows in total. `proposed_tokens`: maximum number of proposed tokens per sequence
    and step. `written_tokens`: maximum number of known tokens that a step writes to a slot after
    the slot was loaded."""

    slots: int
    step_tokens: int
    context_tokens: int
    proposed_tokens: int = 0
    written_tokens: int = 0

    @property
    def draws(self) -> int:
        """Maximum number of rows that sample a token."""
        return min(max(self.slots, 1 + self.proposed_tokens), self.step_tokens)


@dataclass(frozen=True, slots=True)
class DeviceImages:
    """Image rows that the step writes to a cache group: slots [image rows] int32 and indices
    [image rows] int64, and the images that they belong to.

    after_image [rows] bool: as in `AttentionPlan`.
    """

    writes: tuple[ImageWrite, ...]
    after_image: Tensor
    slots: Tensor
    indices: Tensor


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """The indices of one cache group that rows attend to: begin and end [rows] int32. `seen`: the
    same on the host."""

    seen: SeenIndices
    begin: Tensor
    end: Tensor
    images: DeviceImages | None


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """The rows of one step, on the device; valid until the next step is prepared.

    rows: of the chunks, on the host. positions [rows] int64; row_slot [rows] int32.
    form: of rows that need nothing else of the host, such as image features; each row of ONE_EACH,
    and no row but the last one of ONE_SPAN, is an output. The inputs of such steps with the same
    form and number of rows have the same addresses. Additional rows are padding: position 0 of the
    slot after the last one, attending to nothing; outputs are padded with row 0, to one in
    ONE_SPAN.
    output_rows [draws + scored + pooled rows] int64: the sampling rows of the chunks in `drawing`,
    then the rows that `scored` and `pooled` read. constrained: which sampling rows need masks.
    draws_alone: each row draws a token, which depends on its logits alone.
    image_rows [n] int64: the rows of `images`, concatenated. axes [axes, rows] int64: as in
    `Batch`.
    """

    rows: StepRows
    form: RowForm | None
    positions: Tensor
    axes: Tensor | None
    row_slot: Tensor
    image_rows: Tensor
    images: tuple[FeatureRows, ...]
    groups: tuple[DeviceGroup, ...]
    output_rows: Tensor
    draws: Draws
    drawing: tuple[int, ...]
    constrained: tuple[int, ...]
    draws_alone: bool
    scored: ScoredStep
    pooled: PooledStep


class PreparedStep(NamedTuple):
    """What a step changes before its rows are computed, and its rows."""

    changes: DeviceChanges
    inputs: DeviceInputs


@dataclass(frozen=True, slots=True)
class _DecodeStep:
    """The inputs of a decode step, which the next step of the same sequences has too, but at other
    positions.

    version: of `SlotRequests`. slots: of the chunks, which have one row each and sample; plain_from
    and axes_shift: of these slots. positions [rows], and axes [axes, rows]. drawn [draws]: the
    chunks that draw, in this order, and draw_positions [draws]. nbytes: of the inputs, at the front
    of a buffer.
    """

    version: int
    slots: list[int]
    plain_from: list[int]
    axes_shift: Column
    inputs: DeviceInputs
    positions: NDArray[np.int64]
    axes: NDArray[np.int64] | None
    drawn: Column
    draw_positions: NDArray[np.int64]
    nbytes: int

    def holds_for(self, chunks: Sequence[Chunk], version: int) -> bool:
        """Whether a step with these chunks differs in its positions only."""
        return (
            version == self.version
            and self.slots == [chunk.slot for chunk in chunks]
            and all(
                chunk.length == 1 and chunk.samples and chunk.start >= plain_from
                for chunk, plain_from in zip(chunks, self.plain_from, strict=True)
            )
        )

    def at(self, starts: list[int], kinds: Sequence[CacheKind]) -> DeviceInputs:
        """The inputs at other positions, [rows]."""
        inputs = self.inputs
        inputs.rows.starts[:] = self.positions[:] = starts
        if self.axes is not None:
            self.axes[:] = self.positions + self.axes_shift
        self.draw_positions[:] = (self.positions + 1)[self.drawn]
        for kind, group in zip(kinds, inputs.groups, strict=True):
            group.seen.begin[:], group.seen.end[:] = kind.seen_by(starts)
        return inputs


@dataclass(slots=True)
class _HostStep:
    """A buffer, and the decode step whose inputs are in it."""

    buffer: PinnedBuffer
    decode: _DecodeStep | None = None


# From a step's form and rows to its rows with padding; None: the form makes no difference.
PaddedRows = Callable[[RowForm, int], int | None]


def unpadded(form: RowForm, count: int) -> int | None:
    return count if form is RowForm.ONE_EACH else None


class InputPreparer:
    """Writes plans to a host buffer and uploads them; for CUDA to two pinned buffers in turn.

    room: steps of a form with at most this number of rows have their inputs at the same addresses.
    """

    def __init__(
        self,
        layout: CacheLayout,
        pool: PagePool,
        sampler: Sampler,
        limits: StepLimits,
        *,
        device: torch.device,
        position_axes: int = 1,
        padded_rows: PaddedRows = unpadded,
        room: int = 0,
    ) -> None:
        self._padded_rows = padded_rows
        self._kinds = layout.kinds
        self._axes = position_axes
        self._pool = pool
        self._sampler = sampler
        self._draws, self._slots = limits.draws, limits.slots
        self._room = max(room, limits.draws)
        assert self._room <= limits.step_tokens
        self._requests = SlotRequests(
            slots=limits.slots,
            vocab_size=sampler.vocab_size,
            by_image=any(kind.by_image for kind in layout.kinds),
            position_axes=position_axes,
        )
        nbytes, device_bytes = buffer_bytes(layout, limits, sampler.vocab_size), None
        if device.type == "cuda":
            device_bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        buffers = 1 if device_bytes is None else 2
        self._steps = [_HostStep(PinnedBuffer(nbytes, device_bytes)) for _ in range(buffers)]

    def prepare(self, plan: StepPlan) -> PreparedStep:
        """Write and upload one plan. Waits only if the upload before the last is in progress. On a
        CPU the step before must have been computed."""
        self._steps.reverse()
        step, chunks = self._steps[0], plan.chunks
        buffer, decode = step.buffer, step.decode
        self._requests.update(chunks)
        if decode is not None and decode.holds_for(chunks, self._requests.version):
            buffer.clear(keep=decode.nbytes)
            inputs = decode.at([chunk.start for chunk in chunks], self._kinds)
        else:
            buffer.clear()
            step.decode = None
            inputs = self._write(buffer, chunks)
            step.decode = self._decode_step(buffer, inputs)
        changes = write_changes(buffer, plan, self._pool, self._sampler)
        buffer.upload()
        return PreparedStep(changes, inputs)

    def _write(self, buffer: PinnedBuffer, chunks: Sequence[Chunk]) -> DeviceInputs:
        rows, room = StepRows.of(chunks), self._room
        plain = self._plain(rows)
        insertions, scored, pooled = _NOTHING
        if not plain.all():
            spans = rows.spans()
            insertions = plan_insertions(chunks, spans)
            scored, pooled = plan_scores(chunks, spans), plan_pooling(chunks, spans)
        drawing = self._drawing_order(rows)
        output_rows = [*(rows.ends[drawing] - 1).tolist(), *scored.rows, *pooled.rows]
        form = None if insertions.rows else _form(rows, outputs=len(output_rows), plain=plain)
        count = None if form is None else self._padded_rows(form, rows.count)
        form = None if count is None else form
        space = _Space(count or rows.count, room, self._slots)
        # In steps of a form with up to `room` rows, these parts are at the same offsets, where
        # recordings read them, and so are slots and positions of draws.
        positions, row_slot = _write_rows(buffer, rows, space)
        groups = tuple(
            _write_group(buffer, kind, chunks, rows, plain, space) for kind in self._kinds
        )
        if form is not None:
            padded = space.rows if form is RowForm.ONE_EACH else 1
            output_rows += [0] * (padded - len(output_rows))
        outputs = buffer.put(output_rows, _INT64, room=room)
        axes = self._write_axes(buffer, chunks, rows, plain, space) if self._axes > 1 else None
        image_rows = buffer.put(insertions.rows, _INT64)
        draws = self._write_draws(buffer, chunks, rows, drawing)
        constrained = self._requests.constrained[rows.slots[drawing]].nonzero()[0].tolist()
        each_draws = form is RowForm.ONE_EACH and len(drawing) == len(chunks)
        alone = each_draws and not constrained
        return DeviceInputs(
            rows,
            form,
            positions,
            axes,
            row_slot,
            image_rows,
            insertions.parts,
            groups,
            outputs,
            draws,
            tuple(drawing.tolist()),
            tuple(constrained),
            alone and draws.from_logits_alone,
            scored,
            pooled,
        )

    def _decode_step(self, buffer: PinnedBuffer, inputs: DeviceInputs) -> _DecodeStep | None:
        """How the inputs, the last ones in the buffer, can be used again; None if they cannot."""
        rows, draws, axes = inputs.rows, inputs.draws, inputs.axes
        alike = rows.samples.all() and self._plain(rows).all()
        if inputs.form is not RowForm.ONE_EACH or not alike or draws.reads_history:
            return None
        return _DecodeStep(
            self._requests.version,
            rows.slots.tolist(),
            self._requests.plain_from[rows.slots].tolist(),
            self._requests.axes_shift[rows.slots],
            inputs,
            buffer.on_host(inputs.positions)[: rows.count],
            None if axes is None else buffer.on_host(axes)[:, : rows.count],
            np.array(inputs.drawing, np.int64),
            buffer.on_host(draws.positions),
            buffer.used,
        )

    def _plain(self, rows: StepRows) -> NDArray[np.bool_]:
        """[chunks]: which have only plain rows, see `SlotRequests`."""
        return rows.starts >= self._requests.plain_from[rows.slots]

    def _write_axes(
        self,
        buffer: PinnedBuffer,
        chunks: Sequence[Chunk],
        rows: StepRows,
        plain: NDArray[np.bool_],
        space: "_Space",
    ) -> Tensor:
        count = self._axes
        array, axes = buffer.take(count * space.rows, _INT64, room=count * space.room)
        written = array.reshape(count, -1)
        shift = self._requests.axes_shift[rows.slots]
        written[:, : rows.count] = rows.positions() + shift.repeat(rows.lengths)
        written[:, rows.count :] = 0
        for index in (~plain).nonzero()[0].tolist():
            chunk, part = chunks[index], slice(rows.begins[index], rows.ends[index])
            end = chunk.start + chunk.length
            written[:, part] = axes_of(chunk.sequence.spans, chunk.start, end, count)
        return axes.view(count, -1)

    def _drawing_order(self, rows: StepRows) -> Column:
        """Indices of the chunks that draw a token, ordered by sampling path."""
        drawing = (rows.samples & self._requests.draws[rows.slots]).nonzero()[0]
        paths = self._requests.path[rows.slots[drawing]]
        return drawing[paths.argsort(kind="stable")]

    def _write_draws(
        self, buffer: PinnedBuffer, chunks: Sequence[Chunk], rows: StepRows, drawing: Column
    ) -> Draws:
        """`drawing` [drawn]: the chunks that draw a token, in this order."""
        requests, room = self._requests, self._draws
        slots, ends = rows.slots[drawing], (rows.starts + rows.lengths)[drawing]
        counts = np.bincount(requests.path[slots], minlength=len(SamplingPath))
        biased = requests.biases[slots].nonzero()[0]
        width = int(requests.biases[slots].max(initial=0))
        return Draws(
            slots=buffer.put(slots, _INT64, room=room),
            positions=buffer.put(ends, _INT64, room=room),
            counts=tuple(counts.tolist()),
            width=int(requests.top_k[slots].max(initial=0)),
            penalised=self._write_penalised(buffer, chunks, drawing, slots, ends),
            scored=self._write_scored(buffer, slots),
            biased=BiasedRows(buffer.put(biased, _INT64), width) if width else None,
            repeating=self._write_repeating(buffer, slots, ends),
            restricted=self._write_restricted(buffer, slots),
        )

    def _write_penalised(
        self,
        buffer: PinnedBuffer,
        chunks: Sequence[Chunk],
        drawing: Column,
        slots: Column,
        ends: Column,
    ) -> PenalisedRows | None:
        """`drawing`: as in `_write_draws`; ends [drawn]: as in `_write_repeating`."""
        rows = self._requests.penalised[slots].nonzero()[0].tolist()
        if not rows:
            return None
        drawn = [chunks[index].sequence.sampling for index in drawing]
        window = max(_lookback(drawn[row], int(ends[row])) for row in rows)
        return PenalisedRows(buffer.put(rows, _INT64), window)

    def _write_scored(self, buffer: PinnedBuffer, slots: Column) -> ScoredRows | None:
        alternatives = self._requests.alternatives[slots]
        rows = (alternatives >= 0).nonzero()[0]
        if not len(rows):
            return None
        return ScoredRows(buffer.put(rows, _INT64), int(alternatives.max()))

    def _write_repeating(
        self, buffer: PinnedBuffer, slots: Column, ends: Column
    ) -> RepeatingRows | None:
        """slots, ends [drawn]: of the chunks, and the position after the last one of each."""
        repeats = self._requests.repeats[slots]
        rows = (repeats >= 0).nonzero()[0]
        if not len(rows):
            return None
        window = int(ends[rows].max())
        return RepeatingRows(buffer.put(rows, _INT64), window, int(repeats.max()))

    def _write_restricted(self, buffer: PinnedBuffer, slots: Column) -> RestrictedRows | None:
        words, limited = self._requests.words[slots], self._requests.limited[slots]
        rows = (limited | (words > 0)).nonzero()[0]
        if not len(rows):
            return None
        longest = int(self._requests.word_tokens[slots].max())
        return RestrictedRows(
            buffer.put(rows, _INT64), int(words.max()), longest, bool(limited.any())
        )


def buffer_bytes(layout: CacheLayout, limits: StepLimits, vocab_size: int) -> int:
    """Bytes that the largest plan takes."""
    slots, groups = limits.slots, len(layout.groups)
    by_image = sum(kind.by_image for kind in layout.kinds)
    # positions, axes, image rows, and scored or pooled rows; slots; begin and end; after_image
    rows = limits.step_tokens * (8 * (3 + MOST_AXES) + 4 + 8 * groups + by_image)
    images = 2 * 8 * by_image * layout.image_rows
    draws = 7 * 8 * limits.draws
    written = 3 * 8 * max(limits.draws, slots * limits.written_tokens)
    held = layout.held_pages(limits.context_tokens, limits.step_tokens)
    tables = (8 + 4) * slots * sum(held)
    specs = sampler_specs(context_tokens=limits.context_tokens, vocab_size=vocab_size)
    row_bytes = sum(8 + spec.row_bytes for spec in specs)
    loads = slots * (4 * limits.context_tokens + row_bytes)
    parts = 19 + 5 * groups + slots + sum(1 + len(spec.columns) for spec in specs)
    return rows + images + draws + written + tables + loads + ALIGNMENT * parts


def _lookback(sampling: SamplingParams, end: int) -> int:
    """How many positions before `end` the penalties read."""
    begin = 0 if sampling.repeat_penalty != 1.0 else sampling.counted_from
    within = max(0, end - begin)
    return within if sampling.repeat_last_n is None else min(sampling.repeat_last_n, within)


def _form(rows: StepRows, *, outputs: int, plain: NDArray[np.bool_]) -> RowForm | None:
    """The form of rows without image features. `plain`: as in `SlotRequests.plain_from`."""
    chunks = len(rows.slots)
    if chunks == rows.count == outputs:
        return RowForm.ONE_EACH
    return RowForm.ONE_SPAN if chunks == 1 < rows.count and plain.all() else None


class _Space(NamedTuple):
    """The rows of a step, with padding, and `room`, the minimum size of each part in elements."""

    rows: int
    room: int
    padding_slot: int


def _write_rows(buffer: PinnedBuffer, rows: StepRows, space: _Space) -> tuple[Tensor, Tensor]:
    """The position and the slot of each row."""
    count = rows.count
    position_array, positions = buffer.take(space.rows, _INT64, room=space.room)
    slot_array, slots = buffer.take(space.rows, _INT32, room=space.room)
    position_array[:count], position_array[count:] = rows.positions(), 0
    slot_array[:count], slot_array[count:] = rows.slots.repeat(rows.lengths), space.padding_slot
    return positions, slots


def _write_group(
    buffer: PinnedBuffer,
    kind: CacheKind,
    chunks: Sequence[Chunk],
    rows: StepRows,
    plain: NDArray[np.bool_],
    space: _Space,
) -> DeviceGroup:
    """`plain` [chunks]: which have only plain rows."""
    count = rows.count
    begin_array, begin = buffer.take(space.rows, _INT32, room=space.room)
    end_array, end = buffer.take(space.rows, _INT32, room=space.room)
    seen = SeenIndices(begin_array[:count], end_array[:count])
    seen.write(kind, chunks, rows, plain)
    begin_array[count:] = end_array[count:] = 0
    images = _write_images(buffer, kind, chunks, rows) if kind.by_image else None
    return DeviceGroup(seen, begin, end, images)


def _write_images(
    buffer: PinnedBuffer, kind: CacheKind, chunks: Sequence[Chunk], rows: StepRows
) -> DeviceImages:
    after_array, after = buffer.take(rows.count, torch.bool)
    writes: list[ImageWrite] = []
    slots: list[int] = []
    indices: list[int] = []
    for chunk, span in zip(chunks, rows.spans(), strict=True):
        images, stop = chunk.sequence.spans, chunk.start + chunk.length
        first = min((image.start for image in images if image.cross_rows), default=stop)
        written = after_array[span.begin : span.end]
        written[:] = True
        written[: max(0, first - chunk.start)] = False
        for place in kind.filled_images(chunk.start, stop, images):
            begin = len(indices)
            indices += [*place.rows, *place.padding]
            slots += [chunk.slot] * (len(indices) - begin)
            writes.append(ImageWrite(place.image.digest, begin, len(indices)))
    return DeviceImages(
        tuple(writes), after, buffer.put(slots, _INT32), buffer.put(indices, _INT64)
    )
