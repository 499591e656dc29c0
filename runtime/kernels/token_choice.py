"""The cached tokens that each row attends to, where an indexer chooses them."""

import ctypes
from dataclasses import replace

import torch
from torch import Tensor

from runtime.kernels.attention import CACHE_TYPE_NUMBERS, TWIN_ELEMENTS, native_kernels
from runtime.kernels.cache_rows import decode_rows
from runtime.kernels.native import address, row_address
from runtime.kernels.pointwise import contiguous
from runtime.kernels.triton.launch import has_kernels
from runtime.worker.model import AttentionPlan, LayerPages, RowForm, RowSpan


def choose_tokens(
    queries: Tensor,
    weights: Tensor,
    pages: LayerPages,
    plan: AttentionPlan,
    attended: AttentionPlan,
    most: int,
) -> AttentionPlan:
    """The plan of an attention whose rows see at most `most` of the positions that they see in
    `plan`, for `LayerPages.cells` of layers in the group of `attended`.

    queries float32 [tokens, heads, dim] and weights [tokens, heads] of an indexer whose keys, one
    per position, are in `pages`. Row r chooses the positions with the highest sums over heads h of
    weights[r, h] * relu(queries[r, h] . key), of equal ones the lower positions; the result has
    them in ascending order. DeepSeek-AI, "DeepSeek-V3.2", section 2.1. With C kernels, the choice
    of a row does not depend on other rows.
    """
    if (kernels := native_kernels(pages)) is not None:
        return _choose_tokens_cpu(kernels, queries, weights, pages, plan, attended, most)
    if has_kernels(queries.device):
        from runtime.kernels.triton import token_choice

        return token_choice.choose_tokens(queries, weights, pages, plan, attended, most)
    return choose_tokens_twin(queries, weights, pages, plan, attended, most)


def sees_few(plan: AttentionPlan, pages: LayerPages, most: int) -> bool:
    """Whether the host knows that no row sees more than `most` positions, so that rows may attend
    by `plan` itself. Where the bits of attention do not depend on other rows, they are the same."""
    if plan.page_table.shape[1] * pages.keys.shape[1] <= most:
        return True
    if plan.form is not None:
        return False
    return all(span.start + span.end - span.begin <= most for span in plan.spans)


def choose_tokens_twin(
    queries: Tensor,
    weights: Tensor,
    pages: LayerPages,
    plan: AttentionPlan,
    attended: AttentionPlan,
    most: int,
) -> AttentionPlan:
    """The specification of `choose_tokens`."""
    page_tokens = pages.keys.shape[1]
    capacity = plan.page_table.shape[1] * page_tokens
    rows, most = len(queries), min(most, capacity)
    cells = plan.row_slot.new_empty(rows, most)
    limits = plan.row_slot.new_zeros(3, rows)
    limits[0] = torch.arange(rows, device=limits.device)
    at_once = max(1, TWIN_ELEMENTS // (capacity * (pages.dims[0] + queries.shape[1])))
    for begin in range(0, rows, at_once):
        some = slice(begin, begin + at_once)
        table = plan.page_table[plan.row_slot[some].long()].long()
        scores = _scores(queries[some], weights[some], pages, table)
        position = torch.arange(capacity, device=scores.device)
        visible = position >= plan.visible_begin[some, None]
        visible &= position < plan.visible_end[some, None]
        scores = scores.masked_fill_(~visible, -torch.inf)
        chosen = scores.sort(dim=1, descending=True, stable=True).indices[:, :most]
        seen = visible.gather(1, chosen)
        limits[2, some] = seen.sum(dim=1)
        position = chosen.masked_fill(~seen, capacity).sort(dim=1).values
        table = attended.page_table[attended.row_slot[some].long()]
        page = table.gather(1, position.clamp(max=capacity - 1) // page_tokens)
        found = (page * page_tokens + position % page_tokens).int()
        cells[some] = found.masked_fill_(position == capacity, 0)
    return plan_of(cells, limits, attended)


def _scores(queries: Tensor, weights: Tensor, pages: LayerPages, table: Tensor) -> Tensor:
    """[rows, positions] of rows with the pages `table` [rows, pages]."""
    used = table.clamp(0, pages.keys.shape[0] - 1)
    keys = decode_rows(pages.keys[used].flatten(1, 3), pages.type, pages.dims[0])
    products = torch.einsum("rhd,rpd->rhp", queries.float(), keys).relu()
    return torch.einsum("rhp,rh->rp", products, weights.float())


def plan_of(cells: Tensor, limits: Tensor, attended: AttentionPlan) -> AttentionPlan:
    """The result of `choose_tokens`. cells int32 [rows, most]: those of row r's tokens, and zeros;
    limits int32 [3, rows]: the number of each row, 0, and the number of its tokens."""
    rows, most = cells.shape
    return replace(
        attended,
        page_table=cells,
        row_slot=limits[0],
        visible_begin=limits[1],
        visible_end=limits[2],
        spans=tuple(RowSpan(row, row + 1, row, 0, 0, most) for row in range(rows)),
        form=RowForm.ONE_EACH,
    )


class _ChoiceJob(ctypes.Structure):
    """`caravan_choice_job` in cpu/token_choice.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "queries", "weights", "keys", "key_table", "cell_table", "row_slot", "visible_begin",
            "visible_end", "cells", "limits", "scratch",
        )),
        *((name, ctypes.c_int64) for name in ("key_stride", "cell_stride")),
        *((name, ctypes.c_int32) for name in (
            "type", "page_tokens", "rows", "heads", "dim", "most", "capacity", "threads",
        )),
    )  # fmt: skip


def _choose_tokens_cpu(
    kernels: ctypes.CDLL,
    queries: Tensor,
    weights: Tensor,
    pages: LayerPages,
    plan: AttentionPlan,
    attended: AttentionPlan,
    most: int,
) -> AttentionPlan:
    (rows, heads, dim), page_tokens = queries.shape, pages.keys.shape[1]
    tables = plan.page_table, attended.page_table
    if tables[0].shape != tables[1].shape:
        raise ValueError("the groups of an indexer and of its layer have other page tables")
    capacity = tables[0].shape[1] * page_tokens
    most = min(most, capacity)
    queries, weights = contiguous(queries.float()), contiguous(weights.float())
    cells = torch.empty(rows, most, dtype=torch.int32)
    limits = torch.empty(3, rows, dtype=torch.int32)
    key_row = pages.type.width(dim)
    job = _ChoiceJob(
        address(queries, (rows, heads, dim)), address(weights, (rows, heads)),
        address(pages.keys, (*pages.keys.shape[:2], 1, key_row), pages.type.dtype),
        *(row_address(table, table.shape, torch.int32) for table in tables),
        address(plan.row_slot, (rows,), torch.int32),
        address(plan.visible_begin, (rows,), torch.int32),
        address(plan.visible_end, (rows,), torch.int32),
        cells.data_ptr(), limits.data_ptr(), None, *(table.stride(0) for table in tables),
        CACHE_TYPE_NUMBERS[pages.type], page_tokens, rows, heads, dim, most, capacity,
        torch.get_num_threads(),
    )  # fmt: skip
    scratch = torch.empty(kernels.caravan_choice_scratch(ctypes.byref(job)))
    job.scratch = scratch.data_ptr()
    kernels.caravan_choose_tokens(ctypes.byref(job))
    return plan_of(cells, limits, attended)
