"""The tensors behind the pages, and the page tables on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.kv.spec import CacheLayout
from runtime.model import LayerPages


class KVPool:
    """Keys and values of every layer, in pages, and which page holds what of each slot.

    `pages`: how many each group has. All memory is touched here, so that none is missing later.
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
    ) -> None:
        assert len(pages) == len(layout.groups)
        shape = (len(layout.groups), slots, pages_per_sequence)
        self._tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self._layers: dict[int, LayerPages] = {}
        for number, (group, count) in enumerate(zip(layout.groups, pages, strict=True)):
            cache = group.cache
            cells = (count, layout.page_tokens, cache.kv_heads)
            for index in group.layers:
                keys = torch.zeros(*cells, cache.key_dim, dtype=dtype, device=device)
                values = torch.zeros(*cells, cache.value_dim, dtype=dtype, device=device)
                self._layers[index] = LayerPages(keys, values, number)

    @property
    def page_tables(self) -> tuple[Tensor, ...]:
        """Per group: [slots, pages per sequence] int32, the page at each index of a slot."""
        return self._tables.unbind(0)

    def layer(self, index: int) -> LayerPages:
        return self._layers[index]

    def table_cell(self, group: int, slot: int, index: int) -> int:
        """Where `write_pages` finds one entry of a page table."""
        _, slots, pages_per_sequence = self._tables.shape
        assert slot < slots and index < pages_per_sequence
        return (group * slots + slot) * pages_per_sequence + index

    def write_pages(self, cells: Tensor, pages: Tensor) -> None:
        """Put `pages` [n] int32 into the table entries `cells` [n] int64, all different."""
        self._tables.view(-1).index_copy_(0, cells, pages)

    def clear_page(self, page: int) -> None:
        """Zero one page number in every layer."""
        for layer in self._layers.values():
            layer.keys[page].zero_()
            layer.values[page].zero_()


def page_bytes(layout: CacheLayout, group: int, dtype: torch.dtype) -> int:
    """What one page of a group takes in all its layers together."""
    declared = layout.groups[group]
    per_layer = layout.page_tokens * declared.cache.elements_per_token * dtype.itemsize
    return per_layer * len(declared.layers)
