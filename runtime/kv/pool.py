"""The tensors behind the pages, and the page tables on the device."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from runtime.kv.spec import CacheLayout
from runtime.worker.model import LayerPages


class PagePool(Protocol):
    """Pages and their tables, as whoever runs steps sees them; see `KVPool`."""

    @property
    def page_tables(self) -> tuple[Tensor, ...]: ...

    def layer(self, index: int) -> LayerPages: ...

    def table_cell(self, group: int, slot: int, index: int) -> int: ...

    def write_pages(self, cells: Tensor, pages: Tensor) -> None: ...

    def clear_page(self, page: int) -> None: ...


class KVPool:
    """Keys and values of every layer, in pages, and which page holds what of each slot.

    `pages`: how many each group has; `pages_per_sequence`: what a full context takes. All memory is
    touched here, so that none is missing later. `layer_devices`: of each layer's pages, where they
    are not all on `device`, as the page tables are.
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        pages: Sequence[int],
        slots: int,
        pages_per_sequence: int,
        dtype: torch.dtype,
        device: torch.device,
        layer_devices: Sequence[torch.device] | None = None,
    ) -> None:
        assert len(pages) == len(layout.groups)
        self._widths = layout.capacity_pages(pages_per_sequence * layout.page_tokens)
        sizes = [slots * width for width in self._widths]
        self._slots = slots
        self._begins = [0, *accumulate(sizes)]
        self._cells = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._tables = tuple(part.view(slots, -1) for part in self._cells.split(sizes))
        self._layers: dict[int, LayerPages] = {}
        for number, (group, count) in enumerate(zip(layout.groups, pages, strict=True)):
            cache = group.cache
            stored = torch.float32 if cache.exact else dtype
            for index in group.layers:
                place = device if layer_devices is None else layer_devices[index]
                keys, values = (
                    torch.zeros(count, *shape, dtype=stored, device=place)
                    for shape in cache.page_shapes(layout.page_tokens)
                )
                self._layers[index] = LayerPages(keys, values, number)

    @property
    def page_tables(self) -> tuple[Tensor, ...]:
        """Per group: [slots, pages per sequence] int32, the page at each index of a slot."""
        return self._tables

    def layer(self, index: int) -> LayerPages:
        return self._layers[index]

    def table_cell(self, group: int, slot: int, index: int) -> int:
        """Where `write_pages` finds one entry of a page table."""
        width = self._widths[group]
        assert slot < self._slots and index < width
        return self._begins[group] + slot * width + index

    def write_pages(self, cells: Tensor, pages: Tensor) -> None:
        """Put `pages` [n] int32 into the table entries `cells` [n] int64, all different."""
        self._cells.index_copy_(0, cells, pages)

    def clear_page(self, page: int) -> None:
        """Zero one page number in every layer that has so many."""
        for layer in self._layers.values():
            layer.keys[page : page + 1].zero_()
            layer.values[page : page + 1].zero_()


def page_bytes(layout: CacheLayout, group: int, dtype: torch.dtype) -> int:
    """What one page of a group takes in all its layers together."""
    declared = layout.groups[group]
    itemsize = torch.float32.itemsize if declared.cache.exact else dtype.itemsize
    elements = declared.cache.page_elements(layout.page_tokens)
    return elements * itemsize * len(declared.layers)
