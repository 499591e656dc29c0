"""The cached tokens that each row attends to, where an indexer chooses them."""

import ctypes
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from runtime.kernels.attention import CACHE_TYPE_NUMBERS, TWIN_ELEMENTS, native_kernels
from runtime.kernels.cache_rows import decode_rows
from runtime.kernels.native import address, row_address
from runtime.kernels.pointwise import contiguous
from runtime.kernels.triton.launch import has_kernels
from runtime.worker.model import AttentionPlan, LayerPages, RowForm, RowSpan


@dataclass(frozen=True, slots=True)
class Budget:
    """What a row may see: `most` blocks of `block` positions, which begin at multiples of it. The
    last `local` blocks of those that the row sees are chosen before all others."""

    most: int
    block: int = 1
    local: int = 0

    @property
    def tokens(self) -> int:
        return self.most * self.block


def choose_tokens(
    queries: Tensor,
    weights: Tensor | None,
    pages: LayerPages,
    plan: AttentionPlan,
    attended: AttentionPlan,
    budget: Budget,
) -> AttentionPlan:
    """The plan of an attention whose rows see part of the positions that they see in `plan`, for
    `LayerPages.cells` of layers in the group of `attended`.

    queries float32 [tokens, heads, dim] and weights [tokens, heads] of an indexer whose keys, one
    per position, are in `pages`. The score of a position is the sum over heads h of
    weights[r, h] * relu(queries[r, h] . key); DeepSeek-AI, "DeepSeek-V3.2", section 2.1. Row r
    chooses the blocks with the highest scores of a position, of equal ones the lower blocks; the
    result has their positions in ascending order.

    Without weights, each head makes a choice of its own, by its products, for the key/value head of
    the same number: row r * heads + h of the result is that of row r and head h, and sees cells of
    head h.

    With C kernels, the choice of a row does not depend on other rows.
    """
    if (kernels := native_kernels(pages)) is not None:
        return _choose_tokens_cpu(kernels, queries, weights, pages, plan, attended, budget)
    if has_kernels(queries.device):
        from runtime.kernels.triton import token_choice

        return token_choice.choose_tokens(queries, weights, pages, plan, attended, budget)
    return choose_tokens_twin(queries, weights, pages, plan, attended, budget)


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
    weights: Tensor | None,
    pages: LayerPages,
    plan: AttentionPlan,
    attended: AttentionPlan,
    budget: Budget,
) -> AttentionPlan:
    """The specification of `choose_tokens`."""
    page_tokens = pages.keys.shape[1]
    capacity = plan.page_table.shape[1] * page_tokens
    rows, width = len(queries), min(budget.tokens, capacity)
    choices = choices_of(queries, weights)
    cells = plan.row_slot.new_empty(rows, choices, width)
    counts = plan.row_slot.new_empty(rows, choices)
    at_once = max(1, TWIN_ELEMENTS // (capacity * (pages.dims[0] + queries.shape[1])))
    for begin in range(0, rows, at_once):
        some = slice(begin, begin + at_once)
        table = plan.page_table[plan.row_slot[some].long()].long()
        scores = _scores(queries[some], None if weights is None else weights[some], pages, table)
        position = torch.arange(capacity, device=scores.device)
        visible = position >= plan.visible_begin[some, None]
        visible &= position < plan.visible_end[some, None]
        chosen = _chosen(scores, visible.unsqueeze(1), plan.visible_end[some], budget)
        counts[some] = chosen.sum(dim=2)
        position = torch.where(chosen, position, capacity).sort(dim=2).values[..., :width]
        found = cells_at(position, attended, some, page_tokens) * choices
        found += torch.arange(choices, dtype=found.dtype, device=found.device).unsqueeze(1)
        cells[some] = found.masked_fill_(position == capacity, 0)
    return plan_from_counts(cells.flatten(0, 1), counts.flatten(), attended)


def cells_at(positions: Tensor, attended: AttentionPlan, rows: slice, page_tokens: int) -> Tensor:
    """int32, like positions [rows, choices, n] of those rows of `attended`: page * page_tokens +
    offset; any number for positions from the capacity of a page table on."""
    table = attended.page_table[attended.row_slot[rows].long()].unsqueeze(1)
    index = (positions // page_tokens).clamp(max=table.shape[2] - 1)
    page = table.expand(-1, positions.shape[1], -1).gather(2, index)
    return (page * page_tokens + positions % page_tokens).int()


def cached_keys(pages: LayerPages, table: Tensor) -> Tensor:
    """float32 [rows, positions, dim]: the keys of rows with the pages `table` [rows, pages]."""
    used = table.clamp(0, pages.keys.shape[0] - 1)
    return decode_rows(pages.keys[used].flatten(1, 3), pages.type, pages.dims[0])


def choices_of(queries: Tensor, weights: Tensor | None) -> int:
    """The number of choices of each row."""
    return queries.shape[1] if weights is None else 1


def _scores(queries: Tensor, weights: Tensor | None, pages: LayerPages, table: Tensor) -> Tensor:
    """[rows, choices, positions] of rows with the pages `table` [rows, pages]."""
    products = torch.einsum("rhd,rpd->rhp", queries.float(), cached_keys(pages, table))
    if weights is None:
        return products
    return torch.einsum("rhp,rh->rp", products.relu(), weights.float()).unsqueeze(1)


def _chosen(scores: Tensor, visible: Tensor, ends: Tensor, budget: Budget) -> Tensor:
    """scores [rows, choices, positions], visible [rows, 1, positions], ends [rows] of what rows see
    -> the chosen positions, bool [rows, choices, positions]."""
    capacity = scores.shape[2]
    padding = -capacity % budget.block
    scores = pad(scores.masked_fill(~visible, -torch.inf), (0, padding), value=-torch.inf)
    blocks = scores.unflatten(2, (-1, budget.block)).amax(dim=3)
    first_local = (ends - 1).div(budget.block, rounding_mode="floor") - budget.local + 1
    index = torch.arange(blocks.shape[2], device=blocks.device)
    local = (index >= first_local[:, None, None]) & (blocks > -torch.inf)
    ranked = blocks.masked_fill(local, torch.inf).sort(dim=2, descending=True, stable=True).indices
    best = torch.zeros_like(blocks, dtype=torch.bool)
    best.scatter_(2, ranked[..., : budget.most], True)
    return best.repeat_interleave(budget.block, dim=2)[..., :capacity] & visible


def plan_of(cells: Tensor, limits: Tensor, attended: AttentionPlan) -> AttentionPlan:
    """The result of `choose_tokens`. cells int32 [rows, width]: those of row r's tokens, and zeros;
    limits int32 [3, rows]: the number of each row, 0, and the number of its tokens."""
    rows, width = cells.shape
    return replace(
        attended,
        page_table=cells,
        row_slot=limits[0],
        visible_begin=limits[1],
        visible_end=limits[2],
        spans=tuple(RowSpan(row, row + 1, row, 0, 0, width) for row in range(rows)),
        form=RowForm.ONE_EACH,
    )


def plan_from_counts(cells: Tensor, counts: Tensor, attended: AttentionPlan) -> AttentionPlan:
    """As `plan_of`, with the numbers of the rows' tokens, counts int32 [rows]."""
    limits = counts.new_zeros(3, len(cells))
    limits[0] = torch.arange(len(cells), device=limits.device)
    limits[2] = counts
    return plan_of(cells, limits, attended)


class _ChoiceJob(ctypes.Structure):
    """`caravan_choice_job` in cpu/token_choice.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "queries", "weights", "keys", "key_table", "cell_table", "row_slot", "visible_begin",
            "visible_end", "cells", "limits", "scratch",
        )),
        *((name, ctypes.c_int64) for name in ("key_stride", "cell_stride")),
        *((name, ctypes.c_int32) for name in (
            "type", "page_tokens", "rows", "choices", "heads", "dim", "most", "block", "local",
            "width", "capacity", "threads",
        )),
    )  # fmt: skip


def _choose_tokens_cpu(
    kernels: ctypes.CDLL,
    queries: Tensor,
    weights: Tensor | None,
    pages: LayerPages,
    plan: AttentionPlan,
    attended: AttentionPlan,
    budget: Budget,
) -> AttentionPlan:
    (rows, heads, dim), page_tokens = queries.shape, pages.keys.shape[1]
    choices = choices_of(queries, weights)
    tables = plan.page_table, attended.page_table
    if tables[0].shape != tables[1].shape:
        raise ValueError("the groups of an indexer and of its layer have other page tables")
    capacity = tables[0].shape[1] * page_tokens
    width = min(budget.tokens, capacity)
    queries = contiguous(queries.float())
    weights = None if weights is None else contiguous(weights.float())
    cells = torch.empty(rows * choices, width, dtype=torch.int32)
    limits = torch.empty(3, rows * choices, dtype=torch.int32)
    key_row = pages.type.width(dim)
    job = _ChoiceJob(
        address(queries, (rows, heads, dim)),
        None if weights is None else address(weights, (rows, heads)),
        address(pages.keys, (*pages.keys.shape[:2], 1, key_row), pages.type.dtype),
        *(row_address(table, table.shape, torch.int32) for table in tables),
        address(plan.row_slot, (rows,), torch.int32),
        address(plan.visible_begin, (rows,), torch.int32),
        address(plan.visible_end, (rows,), torch.int32),
        cells.data_ptr(), limits.data_ptr(), None, *(table.stride(0) for table in tables),
        CACHE_TYPE_NUMBERS[pages.type], page_tokens, rows * choices, choices, heads // choices, dim,
        min(budget.most, capacity), budget.block, budget.local, width, capacity,
        torch.get_num_threads(),
    )  # fmt: skip
    scratch = torch.empty(kernels.caravan_choice_scratch(ctypes.byref(job)))
    job.scratch = scratch.data_ptr()
    kernels.caravan_choose_tokens(ctypes.byref(job))
    return plan_of(cells, limits, attended)
