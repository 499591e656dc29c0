"""Lookups in tables with a row for each slot: tokens of sequences, and pages of their caches."""

import torch
from torch import Tensor

from runtime.kernels.native import address, library
from runtime.kernels.triton.launch import has_kernels


def slot_entries(
    table: Tensor, slots: Tensor, indices: Tensor | None, *, page_tokens: int = 1
) -> Tensor:
    """Each row's entry at an index of its slot: int64 [rows].

    table int32 [slots, n]; slots int32 [rows]; indices int64 [rows], None: 0 for all. With
    `page_tokens`, entries are pages that hold that many indices each, and the results are cells:
    page * page_tokens + offset. Raises IndexError on a CPU if an entry is outside the table.
    """
    if table.device.type != "cpu" or (kernels := library()) is None:
        if has_kernels(table.device):
            from runtime.kernels.triton import slot_tables

            return slot_tables.slot_entries(table, slots, indices, page_tokens=page_tokens)
        return slot_entries_twin(table, slots, indices, page_tokens=page_tokens)
    (count, length), rows = table.shape, len(slots)
    entries = torch.empty(rows, dtype=torch.int64)
    if kernels.caravan_slot_entries(
        address(table, (count, length), torch.int32), count, length,
        address(slots, (rows,), torch.int32),
        None if indices is None else address(indices, (rows,), torch.int64),
        page_tokens, rows, entries.data_ptr(),
    ):  # fmt: skip
        raise IndexError(f"an entry outside {count} slots of {length} entries")
    return entries


def slot_entries_twin(
    table: Tensor, slots: Tensor, indices: Tensor | None, *, page_tokens: int = 1
) -> Tensor:
    """The specification of `slot_entries`."""
    slots = slots.long()
    if indices is None:
        return table[slots, 0].long() * page_tokens
    pages = table[slots, indices // page_tokens].long()
    return pages * page_tokens + indices % page_tokens
