"""How rank 0 sends each step to the other ranks, and how they compute it.

Only rank 0 plans and samples. Before it computes hidden states or logits, it sends the other ranks
a short message over their control channels with the sizes of everything, then broadcasts one tensor
of integers that describes the rows. They need no sampler: the input tokens come with the step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.distributed.control_channel import ControlChannel, RankZero
from runtime.engine.request import Result
from runtime.engine.step_plan import Runner, StepPlan
from runtime.kv.page_group import CopyKind, KeyShift, PageCopy
from runtime.kv.pool import PagePool
from runtime.worker.model import (
    AttentionPlan,
    Batch,
    DecoderModel,
    ImageWrite,
    KVCache,
    LayerPages,
    RowSpan,
)
from runtime.worker.pinned_buffer import ALIGNMENT

_FEATURE_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_PART = ALIGNMENT // 8  # sizes of parts in broadcast integers are multiples of this number


class SupportsBroadcast(Protocol):
    """Copies a tensor of rank 0 to all ranks; see `ProcessRanks`."""

    def broadcast(self, x: Tensor) -> Tensor: ...


class _Command(IntEnum):
    """The first number of a message."""

    STATES = 0  # compute hidden states; the batch follows
    LOGITS = 1  # compute logits of the next n of these states


class Broadcaster:
    """Rank 0's side: sends each command to the other ranks before rank 0 executes it."""

    def __init__(self, rank_zero: RankZero, ranks: SupportsBroadcast) -> None:
        self._rank_zero, self._ranks = rank_zero, ranks
        self._table_writes: list[tuple[Tensor, Tensor]] = []
        self._page_copies: list[PageCopy] = []
        self._key_shifts: list[KeyShift] = []

    def note_pages(self, cells: Tensor, pages: Tensor) -> None:
        """New page table entries, which are sent with the next batch."""
        self._table_writes.append((cells, pages))

    def note_copies(self, copies: Sequence[PageCopy]) -> None:
        """Copies of pages, which are sent with the next batch."""
        self._page_copies += copies

    def note_shifts(self, shifts: Sequence[KeyShift]) -> None:
        """Shifts of keys, which are sent with the next batch and follow its copies."""
        self._key_shifts += shifts

    def send_logits(self, rows: int) -> None:
        self._send([_Command.LOGITS, rows])

    def send_batch(self, batch: Batch) -> None:
        writes, self._table_writes = self._table_writes, []
        cells = [cells for cells, _ in writes]
        sizes = _sizes_of(batch, sum(map(len, cells)))
        copies = [(*copy[:4], copy.cells or 0) for copy in self._page_copies]
        changes = [len(copies), *chain.from_iterable(copies)]
        changes += [len(self._key_shifts), *chain.from_iterable(self._key_shifts)]
        self._page_copies, self._key_shifts = [], []
        self._send([_Command.STATES, *changes, *sizes])
        pages = [pages for _, pages in writes]
        self._ranks.broadcast(_numbers(batch, (cells, pages)))
        if batch.image_features is not None:
            self._ranks.broadcast(batch.image_features.contiguous())
        if batch.cross_features:
            self._ranks.broadcast(torch.cat(batch.cross_features))

    @contextmanager
    def rank_errors(self) -> Iterator[None]:
        """A RuntimeError inside that another rank has caused is raised as that rank's failure."""
        try:
            yield
        except RuntimeError as error:
            raise self._rank_zero.cause_of(error) from error

    def _send(self, numbers: Sequence[int]) -> None:
        self._rank_zero.send(np.array(numbers, np.int64).tobytes())


class RankZeroModel:
    """The decoder on rank 0; all ranks compute each of its steps."""

    def __init__(self, decoder: DecoderModel, broadcaster: Broadcaster) -> None:
        self._decoder, self._broadcaster = decoder, broadcaster
        self.vocab_size, self.hidden_size = decoder.vocab_size, decoder.hidden_size
        self.context_length = decoder.context_length
        self.causal, self.generates = decoder.causal, decoder.generates
        self.position_axes, self.weight_bytes = decoder.position_axes, decoder.weight_bytes
        self.cache_layers, self.cache_devices = decoder.cache_layers, decoder.cache_devices
        self.layer_devices, self.source_layers = decoder.layer_devices, decoder.source_layers
        self.key_rotations = decoder.key_rotations

    def weight_bytes_on(self, device: torch.device) -> int:
        return self._decoder.weight_bytes_on(device)

    def states(self, batch: Batch, cache: KVCache) -> Tensor:
        with self._broadcaster.rank_errors():
            self._broadcaster.send_batch(batch)
            return self._decoder.states(batch, cache)

    def logits(self, states: Tensor) -> Tensor:
        """`states`: the next rows of the last step's states, after those of earlier calls."""
        with self._broadcaster.rank_errors():
            self._broadcaster.send_logits(len(states))
            return self._decoder.logits(states)

    def activation_bytes(self, tokens: int, outputs: int) -> int:
        return self._decoder.activation_bytes(tokens, outputs)


class RankZeroPool:
    """The pages on rank 0; changes of the page tables are applied on all ranks."""

    def __init__(self, pool: PagePool, broadcaster: Broadcaster) -> None:
        self._pool, self._broadcaster = pool, broadcaster

    @property
    def page_tables(self) -> tuple[Tensor, ...]:
        return self._pool.page_tables

    def layer(self, index: int) -> LayerPages:
        return self._pool.layer(index)

    def table_cell(self, group: int, slot: int, index: int) -> int:
        return self._pool.table_cell(group, slot, index)

    def write_pages(self, cells: Tensor, pages: Tensor) -> None:
        self._broadcaster.note_pages(cells.clone(), pages.clone())
        self._pool.write_pages(cells, pages)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        self._broadcaster.note_copies(copies)
        self._pool.copy_pages(copies)

    def shift_keys(self, shifts: Sequence[KeyShift]) -> None:
        self._broadcaster.note_shifts(shifts)
        self._pool.shift_keys(shifts)


class RankZeroRunner:
    """The runner on rank 0. `check` raises if a rank has failed.

    Then the collectives of a step may have been aborted, which ends its kernels with undefined
    sums. A failure is recorded before collectives are aborted, so no such result is returned.
    """

    def __init__(self, runner: Runner, check: Callable[[], None]) -> None:
        self._runner, self._check = runner, check

    def launch(self, plan: StepPlan) -> Any:
        return self._runner.launch(plan)

    def collect(self, launched: Any) -> tuple[Result, ...]:
        results = self._runner.collect(launched)
        self._check()
        return results


@torch.inference_mode()
def follow(
    decoder: DecoderModel,
    pool: PagePool,
    control_channel: ControlChannel,
    ranks: SupportsBroadcast,
    device: torch.device,
) -> None:
    """Compute this rank's part of each command of rank 0, until rank 0 ends."""
    states = torch.empty(0)
    while True:
        try:
            numbers = np.frombuffer(control_channel.receive(), np.int64)
        except EOFError:
            return
        match _Command(numbers[0]):
            case _Command.STATES:
                batch = _received(_MessageReader(numbers[1:]), pool, ranks, device)
                states = decoder.states(batch, pool)
            case _Command.LOGITS:
                rows = int(numbers[1])
                decoder.logits(states[:rows])
                states = states[rows:]


def _sizes_of(batch: Batch, table_writes: int) -> list[int]:
    """The sizes of all tensors, and the host's description of the rows."""
    spans = batch.plans[0].spans
    inserted = batch.image_features
    features = batch.cross_features[0] if batch.cross_features else inserted
    head = [
        len(batch.tokens),
        len(batch.output_rows),
        0 if inserted is None else len(inserted),
        0 if features is None else features.shape[1],
        0 if features is None else _FEATURE_TYPES.index(features.dtype),
        0 if batch.axes is None else len(batch.axes),
        table_writes,
        len(spans),
    ]
    for span in spans:
        head += [span.begin, span.end, span.slot, span.start]
    for plan in batch.plans:
        by_image = plan.after_image is not None
        head += [int(by_image), len(plan.write_cell), len(plan.image_writes)]
        for span in plan.spans:
            assert span.seen_end is not None, "the input preparer sets seen_end"
            head += [span.seen_begin, span.seen_end]
        for write in plan.image_writes:
            head += [write.begin, write.end]
    return head


def _numbers(batch: Batch, table_writes: Sequence[list[Tensor]]) -> Tensor:
    """All integers of a batch, concatenated and each part padded: int64 on the device."""
    parts = [batch.tokens, batch.positions, batch.output_rows, batch.plans[0].row_slot]
    parts += [] if batch.image_rows is None else [batch.image_rows]
    parts += [] if batch.axes is None else [batch.axes.flatten()]
    for plan in batch.plans:
        parts += [plan.visible_begin, plan.visible_end, plan.write_cell]
        parts += [] if plan.after_image is None else [plan.after_image]
    parts += [torch.cat(writes) for writes in table_writes if writes]
    pad = parts[0].new_zeros(_PART - 1, dtype=torch.int64)
    padded = ((part.long(), pad[: _padded(len(part)) - len(part)]) for part in parts)
    return torch.cat([*chain.from_iterable(padded)])


def _padded(size: int) -> int:
    return -(-size // _PART) * _PART


def _received(
    head: "_MessageReader", pool: PagePool, ranks: SupportsBroadcast, device: torch.device
) -> Batch:
    """The batch with the sizes in `head`; also copies pages and updates the page tables."""
    (copies,) = head.take(1)
    pool.copy_pages([_page_copy(*head.take(5)) for _ in range(copies)])
    (shifts,) = head.take(1)
    pool.shift_keys([KeyShift(*head.take(4)) for _ in range(shifts)])
    rows, outputs, inserted, width, kind, axes, writes, chunks = head.take(8)
    spans = [RowSpan(*head.take(4)) for _ in range(chunks)]
    groups = [_GroupReader(head, spans, table) for table in pool.page_tables]
    sizes = [rows, rows, outputs, rows, inserted, axes * rows]
    sizes += [size for group in groups for size in group.sizes(rows)]
    sizes += [writes, writes]
    padded = [_padded(size) for size in sizes]
    numbers = ranks.broadcast(torch.empty(sum(padded), dtype=torch.int64, device=device))
    split = [part[:size] for part, size in zip(numbers.split(padded), sizes, strict=True)]
    tokens, positions, output_rows, slots, image_rows, places, *parts = split
    pool.write_pages(parts[-2], parts[-1].int())
    plans = [group.plan(slots.int(), *parts[4 * n : 4 * n + 4]) for n, group in enumerate(groups)]
    dtype = _FEATURE_TYPES[kind]

    def features(count: int) -> Tensor:
        return ranks.broadcast(torch.empty(count, width, dtype=dtype, device=device))

    image_features = features(inserted) if inserted else None
    counts = next((group.image_counts for group in groups if group.image_counts), [])
    return Batch(
        tokens,
        positions,
        output_rows,
        tuple(plans),
        features(sum(counts)).split(counts) if counts else (),
        image_rows if inserted else None,
        image_features,
        places.view(axes, rows) if axes else None,
    )


def _page_copy(group: int, source: int, target: int, kind: int, cells: int) -> PageCopy:
    return PageCopy(group, source, target, CopyKind(kind), cells or None)


class _MessageReader:
    """The integers of a message, in order."""

    def __init__(self, numbers: NDArray[np.int64]) -> None:
        self._numbers, self._at = numbers.tolist(), 0

    def take(self, count: int) -> list[int]:
        self._at += count
        return self._numbers[self._at - count : self._at]


class _GroupReader:
    """The part of a message about one cache group."""

    def __init__(self, head: _MessageReader, spans: Sequence[RowSpan], table: Tensor) -> None:
        self._table = table
        self._by_image, self._cells, writes = head.take(3)
        seen = [head.take(2) for _ in spans]
        self._spans = tuple(
            RowSpan(span.begin, span.end, span.slot, span.start, *sight)
            for span, sight in zip(spans, seen, strict=True)
        )
        self._writes = tuple(ImageWrite(b"", *head.take(2)) for _ in range(writes))

    @property
    def image_counts(self) -> list[int]:
        return [write.end - write.begin for write in self._writes]

    def sizes(self, rows: int) -> list[int]:
        return [rows, rows, self._cells, rows * self._by_image]

    def plan(
        self, slots: Tensor, begin: Tensor, end: Tensor, cells: Tensor, after: Tensor
    ) -> AttentionPlan:
        return AttentionPlan(
            self._table,
            slots,
            begin.int(),
            end.int(),
            cells,
            self._spans,
            self._writes,
            after.bool() if self._by_image else None,
        )
