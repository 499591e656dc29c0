"""The tensors behind the pages, and the page tables on the device."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from runtime.kv.spec import CacheLayout
from runtime.worker.model import LayerPages


class PagePool(Protocol):
    """What the runner needs of the pages and their tables; see `KVPool`."""

    @property
    def page_tables(self) -> tuple[Tensor, ...]: ...

    def layer(self, index: int) -> LayerPages: ...

    def table_cell(self, group: int, slot: int, index: int) -> int: ...

    def write_pages(self, cells: Tensor, pages: Tensor) -> None: ...

    def clear_page(self, page: int) -> None: ...


class KVPool:
    """The paged keys and values of every layer, and the page table of each slot.

    `pages`: number of pages of each group; `pages_per_sequence`: pages of a full context. All
    memory is allocated and written here. `layer_devices`: the device of each layer's pages; None:
    all are on `device`, as the page tables are.
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
        """The index of a page table entry for `write_pages`."""
        width = self._widths[group]
        assert slot < self._slots and index < width
        return self._begins[group] + slot * width + index

    def write_pages(self, cells: Tensor, pages: Tensor) -> None:
        """Write `pages` [n] int32 to the page table entries `cells` [n] int64, all different."""
        self._cells.index_copy_(0, cells, pages)

    def clear_page(self, page: int) -> None:
        """Zero page `page` in every layer that has it."""
        for layer in self._layers.values():
            layer.keys[page : page + 1].zero_()
            layer.values[page : page + 1].zero_()


def page_bytes(layout: CacheLayout, group: int, dtype: torch.dtype) -> int:
    """Bytes of one page of a group in all of its layers together."""
    declared = layout.groups[group]
    itemsize = torch.float32.itemsize if declared.cache.exact else dtype.itemsize
    elements = declared.cache.page_elements(layout.page_tokens)
    return elements * itemsize * len(declared.layers)
