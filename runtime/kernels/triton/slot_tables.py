"""Lookups in tables of slots on CUDA devices."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.triton.launch import divided, launch

ROWS = 128  # that a program looks up


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots", "indices"])
def slot_entries_kernel(
    table, slots, indices, entries, rows, length, PAGE_TOKENS: tl.constexpr, ROWS: tl.constexpr
):
    """Grid: blocks of ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    at = table + tl.load(slots + row, inside, 0).to(tl.int64) * length
    if indices is None:
        entry = tl.load(at, inside, 0).to(tl.int64) * PAGE_TOKENS
    else:
        index = tl.load(indices + row, inside, 0)
        page = tl.load(at + index // PAGE_TOKENS, inside, 0).to(tl.int64)
        entry = page * PAGE_TOKENS + index % PAGE_TOKENS
    tl.store(entries + row, entry, inside)


def slot_entries(
    table: Tensor, slots: Tensor, indices: Tensor | None, *, page_tokens: int
) -> Tensor:
    """As `runtime.kernels.slot_tables.slot_entries`."""
    rows, length = len(slots), table.shape[1]
    entries = table.new_empty(rows, dtype=torch.int64)
    launch(
        slot_entries_kernel, (divided(rows, ROWS),), table, slots, indices, entries, rows, length,
        PAGE_TOKENS=page_tokens, ROWS=ROWS, num_warps=4, device=table.device,
    )  # fmt: skip
    return entries
