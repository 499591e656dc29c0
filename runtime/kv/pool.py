"""The tensors behind the pages, and the page tables on the device."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from runtime.kernels.key_shift import shift_keys
from runtime.kv.cache_layout import CacheLayout, LayerCache
from runtime.kv.cache_types import CacheType
from runtime.kv.host_copies import HostTier, batches
from runtime.kv.page_group import CopyKind, KeyShift, PageCopy
from runtime.worker.model import DecoderModel, LayerPages, QuantizedRows


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
            shapes = [(count + 1, *each) for each in group.cache.page_shapes(layout.page_tokens)]
            for index in group.layers:
                place = device if layer_devices is None else layer_devices[index]
                self._layers[index] = _empty_pages(group.cache, number, shapes, type, place)
        self._host: HostTier | None = None
        if any(host_pages):
            layers = [[self._layers[index] for index in members] for members in self._members]
            self._host = HostTier(layers, host_pages, workspace_bytes=workspace_bytes)

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
                assert self._host is not None
                self._host.copy(batch)

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


def _empty_pages(
    cache: LayerCache,
    group: int,
    shapes: Iterable[Sequence[int]],
    type: CacheType,
    device: torch.device,
) -> LayerPages:
    """`shapes`: of keys and values, in elements."""
    stored = _stored_type(cache, type)
    keys, values = (
        torch.zeros((*cells, stored.width(dim)), dtype=stored.dtype, device=device)
        for *cells, dim in shapes
    )
    if cache.values_in_keys:
        values = keys[..., : stored.width(cache.value_dim)]
    quantized = None
    if stored.quantized:
        quantized = QuantizedRows(stored, cache.key_dim, cache.value_dim)
    return LayerPages(keys, values, group, quantized, cache.values_in_keys)


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
