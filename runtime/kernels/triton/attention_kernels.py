"""The kernels of paged attention, see `attention.py`.

The bits of a row do not depend on other rows: its positions are divided into blocks and splits by
its own limits, and blocks outside these limits do not change its state.
"""

from math import e, log2

import triton
import triton.language as tl

from runtime.kernels.triton.cache_rows import load_rows
from runtime.kernels.triton.overlap import wait_for_previous
from runtime.kernels.triton.rounded import store_rounded

LOG2_E = tl.constexpr(log2(e))


@triton.jit
def _attend(
    q1, q2, most, total, sum1, sum2,
    keys, key_halves, values, value_halves, pages, kv_head, position, exists, visible,
    slope, own, inner, outer,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_ROW: tl.constexpr,
    K1: tl.constexpr, K2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr,
    DISTANCES: tl.constexpr,
):  # fmt: skip
    """Add the positions [n] to the state of the rows [m].

    The state: the largest score, in units of log2; the sum of weights relative to it; the weighted
    sums of values, whose elements are in two parts of V1 and V2. VALUE_ROW: the elements of a row
    of `values`, more than VALUE_DIM where these are keys, whose beginnings are the values.
    slope, own [m]: with DISTANCES, the rows' slopes in units of log2, and their positions.
    """
    page = tl.load(pages + position // PAGE_TOKENS, mask=exists, other=0).to(tl.int64)
    row = (page * PAGE_TOKENS + position % PAGE_TOKENS) * KV_HEADS + kv_head
    k1 = load_rows(keys, key_halves, row, exists, 0, K1, KEY_DIM, KEY_DIM, BLOCK).to(q1.dtype)
    score = tl.dot(q1, tl.trans(k1), input_precision="ieee")
    if K2 > 0:
        k2 = load_rows(keys, key_halves, row, exists, K1, K2, KEY_DIM, KEY_DIM, BLOCK).to(q1.dtype)
        score = tl.dot(q2, tl.trans(k2), score, input_precision="ieee")
    score = score * inner
    if CAPPED:
        score = outer * (1.0 - 2.0 / (tl.exp2(score) + 1.0))
    if DISTANCES:
        score -= slope[:, None] * tl.abs(position[None, :] - own[:, None]).to(tl.float32)
    score = tl.where(visible, score, float("-inf"))
    higher = tl.maximum(most, tl.max(score, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    fade = tl.exp2(most - base)
    weight = tl.exp2(score - base[:, None])
    total = total * fade + tl.sum(weight, 1)
    weight = weight.to(q1.dtype)
    v1 = load_rows(values, value_halves, row, exists, 0, V1, VALUE_DIM, VALUE_ROW, BLOCK)
    v1 = v1.to(q1.dtype)
    sum1 = tl.dot(weight, v1, sum1 * fade[:, None], input_precision="ieee")
    if V2 > 0:
        v2 = load_rows(values, value_halves, row, exists, V1, V2, VALUE_DIM, VALUE_ROW, BLOCK)
        v2 = v2.to(q1.dtype)
        sum2 = tl.dot(weight, v2, sum2 * fade[:, None], input_precision="ieee")
    return higher, total, sum1, sum2


@triton.jit
def _merge(most, total, sum1, sum2, most_b, total_b, sum1_b, sum2_b, V2: tl.constexpr):
    """Merge two states, with the same operations wherever it is inlined."""
    higher = tl.maximum(most, most_b)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    fade, fade_b = tl.exp2(most - base), tl.exp2(most_b - base)
    total = tl.fma(total, fade, total_b * fade_b)
    sum1 = tl.fma(sum1, fade[:, None], sum1_b * fade_b[:, None])
    if V2 > 0:
        sum2 = tl.fma(sum2, fade[:, None], sum2_b * fade_b[:, None])
    return higher, total, sum1, sum2


@triton.jit
def _finish(
    most, total, sum1, sum2, sinks, result, at, head, exists,
    VALUE_DIM: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Store the results of some states: `head` [m], and `at` [m] in `result`."""
    factor = _factor(most, total, sinks, head, exists, SINKS)
    _store(result, at, exists, sum1 * factor[:, None], 0, V1, VALUE_DIM)
    if V2 > 0:
        _store(result, at, exists, sum2 * factor[:, None], V1, V2, VALUE_DIM)


@triton.jit
def _factor(most, total, sinks, head, exists, SINKS: tl.constexpr):
    """[m], by which the weighted sums of values are multiplied; with the same operations in every
    kernel, whether products may be fused with sums or not."""
    factor = 1.0
    if SINKS:
        sink = tl.load(sinks + head, mask=exists, other=0.0)
        base = tl.maximum(most, sink * LOG2_E)
        factor = tl.exp2(most - base)
        total = tl.fma(total, factor, tl.exp2(tl.fma(sink, LOG2_E, -base)))
    return tl.where(total == 0.0, 0.0, factor / tl.where(total == 0.0, 1.0, total))


@triton.jit
def _store_rounded(
    value, result, at, planes, scales, sums, count, START: tl.constexpr, WIDTH: tl.constexpr,
    DIM: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Round the elements from START on of what is stored at `at` [1] in `result`, float32
    [1, WIDTH]; DIM, WIDTH and START are multiples of 32."""
    group = START // 32 + tl.arange(0, WIDTH // 32)
    value = value.to(result.dtype.element_ty).to(tl.float32)
    groups = tl.reshape(value, [WIDTH // 32, 32])
    store_rounded(
        groups, at // 32 + group, group < DIM // 32, planes, scales, sums, count, PLANES
    )  # fmt: skip


@triton.jit
def _store(
    result, at, exists, value, START: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    element = START + tl.arange(0, WIDTH)
    mask = exists[:, None] & (element < DIM)[None, :]
    tl.store(result + at[:, None] + element[None, :], value.to(result.dtype.element_ty), mask=mask)


@triton.jit
def _load_queries(
    queries, at, exists, START: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    element = START + tl.arange(0, WIDTH)
    mask = exists[:, None] & (element < DIM)[None, :]
    return tl.load(queries + at[:, None] + element[None, :], mask=mask, other=0.0)


@triton.jit
def _is_alone(row_slot, row, rows):
    """Whether neither the row before this one nor the one after it is of its slot."""
    slot = tl.load(row_slot + row)
    before = tl.load(row_slot + row - 1, mask=row > 0, other=-1)
    after = tl.load(row_slot + row + 1, mask=row + 1 < rows, other=-1)
    return (slot != before) & (slot != after)


@triton.jit
def _limits(begins, ends, row, first, after):
    """The positions that rows attend to; none for rows outside [first, after)."""
    here = (row >= first) & (row < after)
    begin = tl.load(begins + row, mask=here, other=0)
    end = tl.load(ends + row, mask=here, other=0)
    sees = begin < end
    return tl.where(sees, begin, 2147483647), tl.where(sees, end, 0)


@triton.jit
def _distances(slopes, positions, head, row, exists, DISTANCES: tl.constexpr):
    """The slopes of heads [m] in units of log2, and the positions of rows [m]."""
    slope, own = 0.0, 0  # placeholders, never used
    if DISTANCES:
        slope = tl.load(slopes + head, mask=exists, other=0.0) * LOG2_E
        own = tl.load(positions + row, mask=exists, other=0).to(tl.int32)
    return slope, own


@triton.jit
def _division(begin, end, N: tl.constexpr, LEAST_SPLIT: tl.constexpr, SPLITS: tl.constexpr):
    """The first position of a row's first block, the positions per split, and the splits."""
    first = begin // N * N
    length = tl.maximum(end - first, 0)
    split = tl.maximum(LEAST_SPLIT, tl.cdiv(tl.cdiv(length, SPLITS), N) * N)
    return first, split, tl.where(end > begin, tl.cdiv(length, split), 0)


@triton.jit(do_not_specialize=["first_row", "rows", "parts", "most_whole"])
def decode_kernel(
    queries, keys, key_halves, values, value_halves, page_table, row_slot, begins, ends, sinks,
    slopes, positions, result, states, sums,
    first_row, rows, parts, most_whole, row_stride, head_stride, table_stride, inner, outer,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_ROW: tl.constexpr,
    K1: tl.constexpr, K2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr, DISTANCES: tl.constexpr,
    SINKS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr,
    LEAST_SPLIT: tl.constexpr, MIXED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Grid: rows x M query heads of a key head x every `parts`-th split.

    WHOLE: 0 for no rows, 1 for those that see at most `most_whole` positions, 2 for all. They have
    one program, which stores the result. Otherwise the state of each split goes to states [rows,
    HEADS, SPLITS, 2] and sums [rows, HEADS, SPLITS, V1 + V2], both from `first_row`.
    MIXED: rows that are not alone in their span are left to `prefill_kernel`.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TILES: tl.constexpr = (GROUP + M - 1) // M
    row = first_row + tl.program_id(0)
    if MIXED:  # noqa: SIM102
        if not _is_alone(row_slot, row, rows):
            return
    kv_head = tl.program_id(1) // TILES
    member = tl.program_id(1) % TILES * M + tl.arange(0, M)
    exists, head = member < GROUP, kv_head * GROUP + member
    begin, end = tl.load(begins + row), tl.load(ends + row)
    part = tl.program_id(2)
    whole = end - begin <= most_whole
    if WHOLE == 1:
        if whole & (part > 0):
            return
        parts = tl.where(whole, 1, parts)
    at = row.to(tl.int64) * row_stride + head * head_stride
    q1 = _load_queries(queries, at, exists, 0, K1, KEY_DIM)
    q2 = q1
    if K2 > 0:
        q2 = _load_queries(queries, at, exists, K1, K2, KEY_DIM)
    slope, own = _distances(slopes, positions, head, row + 0 * member, exists, DISTANCES)
    pages = page_table + tl.load(row_slot + row).to(tl.int64) * table_stride
    first, split, splits = _division(begin, end, N, LEAST_SPLIT, SPLITS)
    most, total, sum1, sum2 = _nothing(M, V1, V2)
    for number in range(part, splits, parts):
        stop = tl.minimum(first + (number + 1) * split, end)
        most_b, total_b, sum1_b, sum2_b = _nothing(M, V1, V2)
        for block in range(first + number * split, stop, N):
            position = block + tl.arange(0, N)
            seen = (position >= begin) & (position < end)
            most_b, total_b, sum1_b, sum2_b = _attend(
                q1, q2, most_b, total_b, sum1_b, sum2_b,
                keys, key_halves, values, value_halves, pages, kv_head, position, seen,
                seen[None, :], slope, own, inner, outer,
                KV_HEADS, KEY_DIM, VALUE_DIM, VALUE_ROW, K1, K2, V1, V2,
                PAGE_TOKENS, BLOCK, CAPPED, DISTANCES,
            )  # fmt: skip
        if WHOLE > 0:
            most, total, sum1, sum2 = _merge(
                most, total, sum1, sum2, most_b, total_b, sum1_b, sum2_b, V2
            )
        if WHOLE < 2:
            stored = exists if WHOLE == 0 else exists & ~whole
            at = ((row - first_row).to(tl.int64) * HEADS + head) * SPLITS + number
            tl.store(states + 2 * at, most_b, mask=stored)
            tl.store(states + 2 * at + 1, total_b, mask=stored)
            at = at * (V1 + V2)
            _store(sums, at, stored, sum1_b, 0, V1, V1)
            if V2 > 0:
                _store(sums, at, stored, sum2_b, V1, V2, V1 + V2)
    if WHOLE > 0:
        kept = exists if WHOLE == 2 else exists & whole
        at = (row.to(tl.int64) * HEADS + head) * VALUE_DIM
        _finish(most, total, sum1, sum2, sinks, result, at, head, kept, VALUE_DIM, V1, V2, SINKS)


@triton.jit(do_not_specialize=["first_row", "rows", "most_whole"])
def merge_kernel(
    row_slot, begins, ends, sinks, states, sums, result, planes, scales, plane_sums,
    first_row, rows, most_whole,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    SINKS: tl.constexpr,
    N: tl.constexpr, SPLITS: tl.constexpr, LEAST_SPLIT: tl.constexpr, MIXED: tl.constexpr,
    PLANES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Grid: rows x query heads. The result from the states of all splits, which is also rounded to
    integers with PLANES; with WHOLE, of rows that `decode_kernel` has not computed."""
    wait_for_previous()
    row = first_row + tl.program_id(0)
    if MIXED:  # noqa: SIM102
        if not _is_alone(row_slot, row, rows):
            return
    begin, end = tl.load(begins + row), tl.load(ends + row)
    if WHOLE:  # noqa: SIM102
        if end - begin <= most_whole:
            return
    head, exists = tl.program_id(1) + tl.arange(0, 1), tl.full((1,), 1, tl.int1)
    _, _, splits = _division(begin, end, N, LEAST_SPLIT, SPLITS)
    most, total, sum1, sum2 = _nothing(1, V1, V2)
    at = ((row - first_row).to(tl.int64) * HEADS + head) * SPLITS
    for _ in range(splits):
        most_b, total_b = tl.load(states + 2 * at), tl.load(states + 2 * at + 1)
        where = sums + at[:, None] * (V1 + V2)
        sum1_b, sum2_b = tl.load(where + tl.arange(0, V1)[None, :]), sum2
        if V2 > 0:
            sum2_b = tl.load(where + V1 + tl.arange(0, V2)[None, :])
        most, total, sum1, sum2 = _merge(
            most, total, sum1, sum2, most_b, total_b, sum1_b, sum2_b, V2
        )
        at += 1
    at = (row.to(tl.int64) * HEADS + head) * VALUE_DIM
    _finish(most, total, sum1, sum2, sinks, result, at, head, exists, VALUE_DIM, V1, V2, SINKS)
    if PLANES > 0:
        factor = _factor(most, total, sinks, head, exists, SINKS)[:, None]
        count = rows * (HEADS * VALUE_DIM // 32)
        _store_rounded(
            sum1 * factor, result, at, planes, scales, plane_sums, count, 0, V1, VALUE_DIM, PLANES
        )  # fmt: skip
        if V2 > 0:
            _store_rounded(
                sum2 * factor, result, at, planes, scales, plane_sums, count, V1, V2, VALUE_DIM,
                PLANES,
            )  # fmt: skip


@triton.jit(do_not_specialize=["first_row", "end_row", "rows"])
def prefill_kernel(
    queries, keys, key_halves, values, value_halves, page_table, row_slot, begins, ends, sinks,
    slopes, positions, result,
    first_row, end_row, rows, row_stride, head_stride, table_stride, inner, outer,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_ROW: tl.constexpr,
    K1: tl.constexpr, K2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr, DISTANCES: tl.constexpr,
    SINKS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HEADS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of M // HEADS_AT_ONCE rows, last tiles first, x HEADS_AT_ONCE query heads of a
    key head. The slots of a tile are computed in turn. Skips rows that are alone in their span."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TILES: tl.constexpr = (GROUP + HEADS_AT_ONCE - 1) // HEADS_AT_ONCE
    ROWS: tl.constexpr = M // HEADS_AT_ONCE
    ROWS_PADDED: tl.constexpr = triton.next_power_of_2(ROWS)
    top = first_row + (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    stop = tl.minimum(top + ROWS, end_row)
    kv_head = tl.program_id(1) // TILES
    row = top + tl.arange(0, M) // HEADS_AT_ONCE
    member = tl.program_id(1) % TILES * HEADS_AT_ONCE + tl.arange(0, M) % HEADS_AT_ONCE
    head = kv_head * GROUP + member
    exists = (row < stop) & (member < GROUP)
    at = row.to(tl.int64) * row_stride + head * head_stride
    q1 = _load_queries(queries, at, exists, 0, K1, KEY_DIM)
    q2 = q1
    if K2 > 0:
        q2 = _load_queries(queries, at, exists, K1, K2, KEY_DIM)
    slope, own = _distances(slopes, positions, head, row, exists, DISTANCES)
    most, total, sum1, sum2 = _nothing(M, V1, V2)
    each = top + tl.arange(0, ROWS_PADDED)
    while top < stop:
        here = tl.load(row_slot + top)
        slot = tl.load(row_slot + each, mask=each < stop, other=-1)
        after = tl.max(tl.where(slot == here, each, top)) + 1
        if not _is_alone(row_slot, top, rows):
            begin, end = _limits(begins, ends, row, top, after)
            least, greatest = tl.min(begin), tl.max(end)
            pages = page_table + here.to(tl.int64) * table_stride
            for block in range(least // N * N, greatest, N):
                position = block + tl.arange(0, N)
                # Other values may be infinite or NaN, and 0 * inf is NaN. Those between the limits
                # of rows of one slot have been written.
                seen = (position >= least) & (position < greatest)
                most, total, sum1, sum2 = _attend(
                    q1, q2, most, total, sum1, sum2,
                    keys, key_halves, values, value_halves, pages, kv_head, position, seen,
                    (position[None, :] >= begin[:, None]) & (position[None, :] < end[:, None]),
                    slope, own, inner, outer,
                    KV_HEADS, KEY_DIM, VALUE_DIM, VALUE_ROW, K1, K2, V1, V2,
                    PAGE_TOKENS, BLOCK, CAPPED, DISTANCES,
                )  # fmt: skip
        else:
            exists = exists & (row != top)
        top = after
    at = (row.to(tl.int64) * HEADS + head) * VALUE_DIM
    _finish(most, total, sum1, sum2, sinks, result, at, head, exists, VALUE_DIM, V1, V2, SINKS)


@triton.jit
def _nothing(M: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr):
    """The state of M rows before the first position."""
    most = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    sum1 = tl.zeros((M, V1), tl.float32)
    sum2 = tl.zeros((M, V2), tl.float32) if V2 > 0 else total  # a placeholder, never used
    return most, total, sum1, sum2
