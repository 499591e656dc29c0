"""Attention over paged keys and values, and writes to the cache."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.kernels.activations import Activations
from runtime.kernels.cache_rows import decode_rows, encode_rows
from runtime.kernels.native import address, library, row_address
from runtime.kernels.pointwise import contiguous
from runtime.kernels.triton.launch import has_kernels
from runtime.kv.cache_types import CacheType
from runtime.quant.weight import Compute
from runtime.worker.model import AttentionPlan, LayerPages, RowSpan


@dataclass(frozen=True, slots=True, eq=False)
class Distances:
    """Scores are reduced by slopes[head] * |positions[row] - position of the key|, after a softcap;
    Press et al., "Train Short, Test Long". slopes float32 [heads], positions int64 [tokens]."""

    slopes: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """How scores s, the products of queries and keys, become weights of values.

    They are multiplied by `scale`; a `softcap` turns them into softcap * tanh(s / softcap).
    `distances`: what is then subtracted from them. `sinks` float32 [heads]: an additional score per
    head, which takes part in the softmax and has no value.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    distances: Distances | None = None


# Maximum number of elements that the twin gathers or scores at once.
TWIN_ELEMENTS = 1 << 25


def write_cache(
    keys: Tensor, values: Tensor | None, pages: LayerPages, plan: AttentionPlan
) -> None:
    """Write keys [tokens, kv_heads, key_dim] and values [.., value_dim] to their cells, in the type
    of the pages; see `encode_rows`. values: None if `pages` has them in keys."""
    assert (values is None) == pages.values_in_keys
    if (kernels := native_kernels(pages)) is not None:
        _write_cache_cpu(kernels, keys, values, pages, plan)
    elif has_kernels(keys.device):
        from runtime.kernels.triton import cache_write

        cache_write.write_cache(keys, values, pages, plan)
    else:
        write_cache_twin(keys, values, pages, plan)


def write_cache_twin(
    keys: Tensor, values: Tensor | None, pages: LayerPages, plan: AttentionPlan
) -> None:
    """The specification of `write_cache`."""
    parts = (keys,) if values is None else (keys, values)
    for rows, stored in zip(parts, pages.stored, strict=True):
        cells = stored.view(-1, *stored.shape[2:])
        cells[plan.write_cell] = encode_rows(rows, pages.type)


def paged_attention(
    queries: Tensor,
    pages: LayerPages,
    plan: AttentionPlan,
    scoring: Scoring,
    *,
    deterministic: bool = False,
) -> Tensor:
    """queries [tokens, heads, key_dim] -> [tokens, heads, value_dim], in the type of the queries.

    Row r attends to the positions visible_begin[r] <= p < visible_end[r] of its slot, query head h
    to kv head h // (heads / kv_heads); scores and softmax in float32. The result of a row that sees
    nothing is zero. With C and Triton kernels, the bits of a row do not depend on other rows, with
    one exception: unless `deterministic`, Triton kernels sum in another order for a row that is
    alone in its span.
    """
    if (kernels := native_kernels(pages)) is not None:
        return _paged_attention_cpu(kernels, queries, pages, plan, scoring)
    if has_kernels(queries.device):
        from runtime.kernels.triton import attention

        return attention.paged_attention(queries, pages, plan, scoring, deterministic=deterministic)
    return paged_attention_twin(queries, pages, plan, scoring)


def attended_rows(
    queries: Tensor,
    pages: LayerPages,
    plan: AttentionPlan,
    scoring: Scoring,
    *,
    deterministic: bool,
    rounding: Compute | None,
) -> Activations:
    """`paged_attention`, flattened to [tokens, heads * value_dim], for products whose weights have
    this `rounding`. Where CUDA devices merge parts of a few rows, they round them in the same
    launch."""
    if rounding is not None and native_kernels(pages) is None and has_kernels(queries.device):
        from runtime.kernels.triton import attention

        return attention.attended_rows(
            queries, pages, plan, scoring, deterministic=deterministic, rounding=rounding
        )
    return paged_attention(queries, pages, plan, scoring, deterministic=deterministic).flatten(1)


def paged_attention_twin(
    queries: Tensor, pages: LayerPages, plan: AttentionPlan, scoring: Scoring
) -> Tensor:
    """The specification of `paged_attention`: gather the pages, then plain softmax attention."""
    shape = (*queries.shape[:2], pages.dims[1])
    result = queries.new_zeros(shape)
    page_tokens = pages.keys.shape[1]
    for spans, length in by_length(plan.spans):
        seen = [_seen_pages(plan, span, page_tokens) for span in spans]
        extent = max(map(len, seen)) * page_tokens
        row_elements = queries.shape[1] * extent
        span_elements = extent * pages.keys.shape[2] * max(pages.dims)
        rows_at_once = max(1, min(length, TWIN_ELEMENTS // max(1, row_elements)))
        per_span = max(1, span_elements, rows_at_once * row_elements)
        spans_at_once = max(1, TWIN_ELEMENTS // per_span)
        for first in range(0, len(spans), spans_at_once):
            some = spans[first : first + spans_at_once]
            used = _page_indices(seen[first : first + spans_at_once], queries.device)
            for offset in range(0, length, rows_at_once):
                rows = span_rows(some, offset, min(length, offset + rows_at_once), queries.device)
                result[rows] = _attend(queries[rows], pages, plan, rows, used, scoring)
    return result


def by_length(spans: tuple[RowSpan, ...]) -> Iterator[tuple[list[RowSpan], int]]:
    """Spans grouped by their number of rows, so that all decoding sequences are one group."""
    groups: dict[int, list[RowSpan]] = {}
    for span in spans:
        groups.setdefault(span.end - span.begin, []).append(span)
    for length, members in groups.items():
        yield members, length


def _seen_pages(plan: AttentionPlan, span: RowSpan, page_tokens: int) -> range:
    """Indices of the pages that these rows see; except on a CPU an upper bound, to avoid
    synchronisation."""
    begin, end = span.seen_begin, span.seen_end
    if end is None and plan.visible_end.device.type == "cpu":
        begin = int(plan.visible_begin[span.begin : span.end].min())
        end = int(plan.visible_end[span.begin : span.end].max())
    elif end is None:
        end = span.start + span.end - span.begin
    return range(begin // page_tokens, -(-end // page_tokens))


def _page_indices(seen: list[range], device: torch.device) -> Tensor:
    """[spans, pages]: consecutive from each span's first page, as many as the longest range has."""
    firsts = torch.tensor([[pages.start] for pages in seen]).to(device, non_blocking=True)
    return firsts + torch.arange(max(map(len, seen)), device=device)


def span_rows(spans: list[RowSpan], begin: int, end: int, device: torch.device) -> Tensor:
    """Indices [spans, end - begin] of the rows [begin, end) of each span."""
    rows = [range(span.begin + begin, span.begin + end) for span in spans]
    return torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)


def _attend(
    queries: Tensor,
    pages: LayerPages,
    plan: AttentionPlan,
    rows: Tensor,
    indices: Tensor,
    scoring: Scoring,
) -> Tensor:
    """queries [spans, rows, heads, key_dim], page indices [spans, pages] -> [.., value_dim]."""
    page_tokens, kv_heads = pages.keys.shape[1:3]
    slots = plan.row_slot[rows[:, :1]].long()
    used = plan.page_table[slots, indices.clamp(max=plan.page_table.shape[1] - 1)]
    used = used.long().clamp(0, pages.keys.shape[0] - 1)
    keys, values = (
        decode_rows(stored[used].flatten(1, 2), pages.type, dim)
        for stored, dim in zip((pages.keys, pages.values), pages.dims, strict=True)
    )
    begin, end = plan.visible_begin[rows].unsqueeze(-1), plan.visible_end[rows].unsqueeze(-1)
    offsets = torch.arange(page_tokens, device=queries.device)
    position = (indices.unsqueeze(-1) * page_tokens + offsets).flatten(1).unsqueeze(1)
    visible = (position >= begin) & (position < end)
    # Values that no row sees may be infinite or NaN, and 0 * inf is NaN.
    values = values.masked_fill(~visible.any(dim=1)[:, :, None, None], 0.0)
    grouped = queries.unflatten(2, (kv_heads, -1)).float()
    scores = torch.einsum("srkgd,spkd->srkgp", grouped, keys) * scoring.scale
    if scoring.softcap is not None:
        scores = scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    if scoring.distances is not None:
        slopes = scoring.distances.slopes.float().view(kv_heads, -1, 1)
        apart = (scoring.distances.positions[rows].unsqueeze(-1) - position).abs()
        scores = scores.sub_(slopes * apart[:, :, None, None, :])
    hidden = ~visible[:, :, None, None, :]
    scores = scores.masked_fill_(hidden, -torch.inf)
    weights = scores.softmax(dim=-1).masked_fill_(hidden, 0.0)
    result = torch.einsum("srkgp,spkd->srkgd", weights, values)
    if scoring.sinks is not None:
        # The weights sum to e^a / (e^a + e^sink), where e^a is the sum over all visible positions.
        kept = scores.logsumexp(dim=-1) - scoring.sinks.float().view(kv_heads, -1)
        result = result * kept.sigmoid().unsqueeze(-1)
    return result.flatten(2, 3).to(queries.dtype)


class _AttentionJob(ctypes.Structure):
    """`caravan_attention_job` in cpu/attention.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "queries", "keys", "values", "page_table", "row_slot", "visible_begin", "visible_end",
            "sinks", "slopes", "positions", "result", "scratch", "tiles",
        )),
        ("table_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in (
            "type", "page_tokens", "rows", "heads", "kv_heads", "key_dim", "value_dim", "threads",
        )),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )  # fmt: skip


class _WrittenPart(ctypes.Structure):
    """`part` in cpu/cache_rows.c."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("cells", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("dim", ctypes.c_int32),
    )


class _WriteJob(ctypes.Structure):
    """`caravan_write_job` in cpu/cache_rows.c."""

    _fields_ = (
        ("keys", _WrittenPart),
        ("values", _WrittenPart),
        ("cell", ctypes.c_void_p),
        ("cells", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("type", "count", "heads", "threads")),
    )


# The numbers of cpu/cache_rows.h, which has no FP8.
CACHE_TYPE_NUMBERS: dict[CacheType, int] = {
    type: number for number, type in enumerate(CacheType) if type is not CacheType.FP8
}


def native_kernels(pages: LayerPages) -> ctypes.CDLL | None:
    """The C kernels, if they know the type of these pages and their device."""
    known = pages.keys.device.type == "cpu" and pages.type in CACHE_TYPE_NUMBERS
    return library() if known else None


def _paged_attention_cpu(
    kernels: ctypes.CDLL,
    queries: Tensor,
    pages: LayerPages,
    plan: AttentionPlan,
    scoring: Scoring,
) -> Tensor:
    softcap, sinks, distances = scoring.softcap, scoring.sinks, scoring.distances
    rows, heads, key_dim = queries.shape
    page_tokens, kv_heads = pages.keys.shape[1:3]
    value_dim = pages.dims[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} heads of keys")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"the softcap is {softcap}; it must be above 0")
    wide = contiguous(queries.float())  # layers without rotation pass rows of a wider product
    result = torch.empty(rows, heads, value_dim)
    tiles = torch.empty(2, rows + 1, dtype=torch.int32)
    keys, values = _page_addresses(pages, key_dim)
    job = _AttentionJob(
        address(wide, queries.shape), keys, values,
        row_address(plan.page_table, plan.page_table.shape, torch.int32),
        address(plan.row_slot, (rows,), torch.int32),
        address(plan.visible_begin, (rows,), torch.int32),
        address(plan.visible_end, (rows,), torch.int32),
        None if sinks is None else address(sinks, (heads,)),
        None if distances is None else address(distances.slopes, (heads,)),
        None if distances is None else address(distances.positions, (rows,), torch.int64),
        result.data_ptr(), None, tiles.data_ptr(), plan.page_table.stride(0),
        CACHE_TYPE_NUMBERS[pages.type], page_tokens, rows, heads, kv_heads, key_dim, value_dim,
        torch.get_num_threads(), scoring.scale, softcap or 0.0,
    )  # fmt: skip
    scratch = torch.empty(kernels.caravan_attention_scratch(ctypes.byref(job)))
    job.scratch = scratch.data_ptr()
    kernels.caravan_attention(ctypes.byref(job))
    return result.to(queries.dtype)


def _write_cache_cpu(
    kernels: ctypes.CDLL,
    keys: Tensor,
    values: Tensor | None,
    pages: LayerPages,
    plan: AttentionPlan,
) -> None:
    page_count, page_tokens, kv_heads = pages.keys.shape[:3]
    count, cells = len(keys), page_count * page_tokens
    rows = [_floats(part) for part in (keys, values) if part is not None]  # so that copies live on
    stored = _page_addresses(pages, keys.shape[2])
    parts = [
        _WrittenPart(
            row_address(part.flatten(1), (count, kv_heads * dim), torch.float32), at,
            part.stride(0), dim,
        )
        for part, at, dim in zip(rows, stored, pages.dims, strict=False)
    ]  # fmt: skip
    if values is None:
        parts.append(_WrittenPart())
    job = _WriteJob(
        *parts, address(plan.write_cell, (count,), torch.int64), cells,
        CACHE_TYPE_NUMBERS[pages.type], count, kv_heads, torch.get_num_threads(),
    )  # fmt: skip
    if kernels.caravan_write_cache(ctypes.byref(job)):
        raise ValueError(f"a row goes to a cell that is none of the {cells:,} of the cache")


def _page_addresses(pages: LayerPages, key_dim: int) -> tuple[int, int | None]:
    """The addresses of the pages of keys, of `key_dim` elements each, and of values, None if these
    are in keys."""
    type, value_dim = pages.type, pages.dims[1]
    cells = pages.values.shape[:3]
    keys = address(pages.keys, (*cells, type.width(key_dim)), type.dtype)
    if pages.values_in_keys:
        return keys, None
    return keys, address(pages.values, (*cells, type.width(value_dim)), type.dtype)


def _floats(rows: Tensor) -> Tensor:
    """float32, the heads of a row adjacent."""
    rows = rows.float()
    adjacent = rows.stride(2) == 1 and rows.stride(1) == rows.shape[2]
    return rows if adjacent else rows.contiguous()
