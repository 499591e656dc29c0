"""The blocks of cached tokens that each row attends to, where an indexer chooses them."""

from collections.abc import Callable

import torch
from torch import Tensor

from runtime.kernels.attention import TWIN_ELEMENTS
from runtime.kernels.token_choice import cached_keys, cells_at, plan_from_counts
from runtime.worker.model import AttentionPlan, LayerPages


def choose_blocks(
    queries: Tensor,
    pages: LayerPages,
    plan: AttentionPlan,
    attended: AttentionPlan,
    *,
    block_keys: Callable[[Tensor], Tensor],
    size: int,
    most: int,
    kv_heads: int,
) -> AttentionPlan:
    """The plan of an attention whose rows see the tokens of at most `most` blocks and those after
    their last whole block, for `LayerPages.cells` of layers in the group of `attended` with
    `kv_heads` key/value heads: row r * kv_heads + h of the result is that of row r and head h.

    queries [tokens, heads, dim] of an indexer whose keys, one per position, are in `pages`. The
    positions that a row sees, all from 0 on, form blocks of `size`. block_keys: from the means of
    the keys of all blocks [blocks, rows, dim] to the keys of the blocks, likewise. Row r chooses
    the blocks with the highest sums over heads h of relu(queries[r, h] . key), of equal ones those
    with lower positions. There is no native kernel, so steps that choose are not recorded on CPUs.
    """
    capacity = plan.page_table.shape[1] * pages.keys.shape[1]
    rows, width = len(queries), min((most + 1) * size - 1, capacity)
    cells = plan.row_slot.new_empty(rows, width)
    counts = plan.row_slot.new_empty(rows)
    position = torch.arange(capacity, device=counts.device)
    at_once = max(1, TWIN_ELEMENTS // (capacity * (pages.dims[0] + queries.shape[1])))
    for begin in range(0, rows, at_once):
        some = slice(begin, begin + at_once)
        slots, end = plan.row_slot[some].long(), plan.visible_end[some, None]
        keys = _block_keys(pages, plan.page_table[slots].long(), size, block_keys)
        scores = torch.einsum("rhd,brd->rhb", queries[some].float(), keys).relu().sum(dim=1)
        whole = end // size
        number = torch.arange(scores.shape[1], device=scores.device)
        scores = scores.masked_fill_(number >= whole, -torch.inf)
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, :most]
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)
        block = (position // size).clamp(max=scores.shape[1] - 1).expand(len(slots), -1)
        seen = chosen.gather(1, block) & (position < whole * size)
        seen |= (position >= whole * size) & (position < end)
        found = position.masked_fill(~seen, capacity).sort(dim=1).values[:, :width]
        counts[some] = seen.sum(dim=1)
        cell = cells_at(found.unsqueeze(1), attended, some, pages.keys.shape[1]).squeeze(1)
        cells[some] = cell.masked_fill_(found == capacity, 0)
    head = torch.arange(kv_heads, dtype=cells.dtype, device=cells.device)
    of_heads = (cells[:, None] * kv_heads + head[:, None]).flatten(0, 1)
    return plan_from_counts(of_heads, counts.repeat_interleave(kv_heads), attended)


def _block_keys(
    pages: LayerPages, table: Tensor, size: int, block_keys: Callable[[Tensor], Tensor]
) -> Tensor:
    """float32 [blocks, rows, dim] of rows with the pages `table` [rows, pages]."""
    keys = cached_keys(pages, table)
    blocks = max(1, keys.shape[1] // size)
    whole = keys[:, : blocks * size].unflatten(1, (blocks, -1))
    return block_keys(whole.mean(dim=2).transpose(0, 1).contiguous()).float()
