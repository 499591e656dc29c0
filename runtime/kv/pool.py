"""The tensors behind the pages, and the page tables on the device."""

from collections.abc import Sequence
from itertools import accumulate, chain
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from runtime.kernels.key_shift import shift_keys
from runtime.kv.cache_types import CacheType
from runtime.kv.host_copies import HostCopies, batches
from runtime.kv.page_group import CopyKind, KeyShift, PageCopy
from runtime.kv.spec import CacheLayout, LayerCache
from runtime.worker.model import DecoderModel, LayerPages, QuantizedRows
from runtime.worker.pinned_buffer import ALIGNMENT


class PagePool(Protocol):
    """The pages and page tables as the runner uses them; see `KVPool`."""

    @property
    def page_tables(self) -> tuple[Tensor, ...]: ...

    def layer(self, index: int) -> LayerPages: ...

    def table_cell(self, group: int, slot: int, index: int) -> int: ...

    def write_pages(self, cells: Tensor, pages: Tensor) -> None: ...

    def copy_pages(self, copies: Sequence[PageCopy]) -> None: ...

    def shift_keys(self, shifts: Sequence[KeyShift]) -> None: ...


class KVPool:
    """The paged keys and values of every layer, and the page table of each slot.

    `pages`: number of pages of each group. One more page, the last, belongs to no sequence; all
    page tables refer to it until `write_pages`, so warm-up and padding rows are written there.
    `pages_per_sequence`: pages of a full context. `type`: cache type of all layers except `exact`
    ones. The constructor allocates and writes all memory. `host_pages`: number of pages of each
    group in host memory, for copies; () for none. `workspace_bytes`: memory of a device that these
    copies may take before a step begins. `decoder`: states the device of each layer's pages and the
    rotations of moved keys; without it, all pages are on `device`, as the page tables are, and keys
    cannot move.
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        pages: Sequence[int],
        slots: int,
        pages_per_sequence: int,
        type: CacheType,
        device: torch.device,
        host_pages: Sequence[int] = (),
        workspace_bytes: int = 0,
        decoder: DecoderModel | None = None,
    ) -> None:
        assert len(pages) == len(layout.groups)
        self._key_rotations = decoder.key_rotations or () if decoder else ()
        layer_devices = decoder.cache_devices if decoder else None
        self._widths = layout.capacity_pages(pages_per_sequence * layout.page_tokens)
        sizes = [slots * width for width in self._widths]
        self._slots = slots
        self._begins = [0, *accumulate(sizes)]
        self._cells = torch.empty(sum(sizes), dtype=torch.int32, device=device)
        self._tables = tuple(part.view(slots, -1) for part in self._cells.split(sizes))
        for table, count in zip(self._tables, pages, strict=True):
            table.fill_(count)
        self._layers: dict[int, LayerPages] = {}
        self._members = tuple(group.layers for group in layout.groups)
        for number, (group, count) in enumerate(zip(layout.groups, pages, strict=True)):
            cache = group.cache
            stored = _stored_type(cache, type)
            quantized = None
            if stored.quantized:
                quantized = QuantizedRows(stored, cache.key_dim, cache.value_dim)
            for index in group.layers:
                place = device if layer_devices is None else layer_devices[index]
                shapes = [
                    (count + 1, *cells, stored.width(dim))
                    for *cells, dim in cache.page_shapes(layout.page_tokens)
                ]
                keys, values = (
                    torch.zeros(shape, dtype=stored.dtype, device=place) for shape in shapes
                )
                if cache.values_in_keys:
                    values = keys[..., : stored.width(cache.value_dim)]
                self._layers[index] = LayerPages(
                    keys, values, number, quantized, cache.values_in_keys
                )
        self._host = self._host_copies(host_pages, workspace_bytes) if any(host_pages) else ()

    def _host_copies(
        self, pages: Sequence[int], workspace_bytes: int
    ) -> tuple[tuple[HostCopies, ...], ...]:
        """Per group, one for each device. All host pages are in one allocation, pinned for CUDA."""
        copies = [self._copies_of_group(group, workspace_bytes) for group in range(len(pages))]
        sizes = [
            count * part.page_bytes
            for count, parts in zip(pages, copies, strict=True)
            for part in parts
        ]
        aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        pinned = any(part.device.type == "cuda" for parts in copies for part in parts)
        whole = torch.empty(sum(aligned), dtype=torch.uint8, pin_memory=pinned)
        if not pinned:
            whole.zero_()  # makes the system allocate the memory now
        pieces = zip(chain.from_iterable(copies), whole.split(aligned), sizes, strict=True)
        for part, piece, used in pieces:
            part.use(piece[:used])
        return tuple(copies)

    def _copies_of_group(self, group: int, workspace_bytes: int) -> tuple[HostCopies, ...]:
        by_device: dict[torch.device, list[Tensor]] = {}
        for index in self._members[group]:
            layer = self._layers[index]
            by_device.setdefault(layer.keys.device, []).extend(layer.stored)
        return tuple(
            HostCopies(parts, workspace_bytes=workspace_bytes) for parts in by_device.values()
        )

    @property
    def page_tables(self) -> tuple[Tensor, ...]:
        """Per group: [slots, pages per sequence] int32, the page at each index of a slot."""
        return self._tables

    def layer(self, index: int) -> LayerPages:
        return self._layers[index]

    def table_cell(self, group: int, slot: int, index: int) -> int:
        """The index of a page table entry for `write_pages`."""
        width = self._widths[group]
        assert slot < self._slots and index < width
        return self._begins[group] + slot * width + index

    def write_pages(self, cells: Tensor, pages: Tensor) -> None:
        """Write `pages` [n] int32 to the page table entries `cells` [n] int64, all distinct."""
        self._cells.index_copy_(0, cells, pages)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Enqueue copies of pages, in order, behind earlier launches; does not synchronise."""
        for batch in batches(copies):
            if batch[0].kind is CopyKind.ON_DEVICE:
                self._copy_on_device(*batch)
            else:
                for part in self._host[batch[0].group]:
                    part.copy(batch)

    def _copy_on_device(self, copy: PageCopy) -> None:
        for index in self._members[copy.group]:
            for part in self._layers[index].stored:
                rows = part[copy.source, : copy.cells]
                part[copy.target, : copy.cells].copy_(rows, non_blocking=True)

    def shift_keys(self, shifts: Sequence[KeyShift]) -> None:
        """Enqueue rotations of keys to other positions; does not synchronise."""
        for group, members in enumerate(self._members):
            moved = [shift for shift in shifts if shift.group == group]
            for index in members if moved else ():
                rotation = self._key_rotations[index]
                if rotation is not None:
                    shift_keys(self._layers[index], rotation, moved)


def cache_bytes(layout: CacheLayout, pages: Sequence[int], type: CacheType) -> int:
    """Bytes of the tensors of a `KVPool`."""
    sizes = (page_bytes(layout, group, type) for group in range(len(layout.groups)))
    return sum((count + 1) * size for count, size in zip(pages, sizes, strict=True))


def page_bytes(layout: CacheLayout, group: int, type: CacheType) -> int:
    """Bytes of one page of a group in all of its layers together."""
    declared = layout.groups[group]
    stored = _stored_type(declared.cache, type)
    shapes = declared.cache.page_shapes(layout.page_tokens)
    return len(declared.layers) * sum(prod(cells) * stored.row_bytes(dim) for *cells, dim in shapes)


def _stored_type(cache: LayerCache, type: CacheType) -> CacheType:
    return CacheType.FLOAT32 if cache.exact else type
