"""The choice of cached tokens on CUDA devices: one launch for scores, one for those of blocks, one
for the highest of them.

The threshold of a row is found digit by digit, from counts of the scores that have each digit, so
that the result does not depend on the order of additions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.token_choice import Budget, choices_of, plan_of
from runtime.kernels.triton.cache_rows import BLOCK_BYTES, kernel_pages, load_rows
from runtime.kernels.triton.launch import divided, launch, next_power, with_adjacent_elements
from runtime.kernels.triton.token_ranks import key_of
from runtime.worker.model import AttentionPlan, LayerPages

# Scores of some rows at once, in float32; no more than the states of divided attention take.
MOST_SCORES = 1 << 25
SCORED = 512  # positions per program
TILE = 64  # positions and, at most, heads that are multiplied at once
BLOCK = 4096  # scores that are compared at once
LEAST = 16  # rows and columns of operands
_DIGITS, _BITS = tl.constexpr(4), tl.constexpr(8)
_VALUES = tl.constexpr(256)  # of a digit


def choose_tokens(
    queries: Tensor,
    weights: Tensor | None,
    pages: LayerPages,
    plan: AttentionPlan,
    attended: AttentionPlan,
    budget: Budget,
) -> AttentionPlan:
    """As `runtime.kernels.token_choice.choose_tokens`."""
    (rows, heads, dim), device = queries.shape, queries.device
    queries, choices = queries.contiguous(), choices_of(queries, weights)
    weighted = weights is not None
    weights = queries if weights is None else with_adjacent_elements(weights)
    page_tokens = pages.keys.shape[1]
    capacity = plan.page_table.shape[1] * page_tokens
    width, blocks = min(budget.tokens, capacity), divided(capacity, budget.block)
    cells = torch.empty(rows * choices, width, dtype=torch.int32, device=device)
    limits = torch.empty(3, rows * choices, dtype=torch.int32, device=device)
    at_once = max(1, min(rows, MOST_SCORES // (choices * capacity)))
    scores = torch.empty(at_once, choices, capacity, dtype=torch.float32, device=device)
    of_blocks = scores if budget.block == 1 else scores.new_empty(at_once, choices, blocks)
    keys, halves, *_ = kernel_pages(pages)
    seen = plan.row_slot, plan.visible_begin, plan.visible_end
    for first in range(0, rows, at_once):
        count = min(at_once, rows - first)
        launch(
            score_kernel, (divided(capacity, SCORED), count), queries, weights, keys, halves,
            plan.page_table, *seen, scores, first, capacity, plan.page_table.stride(0),
            weights.stride(0), HEADS=heads, WEIGHTED=weighted, DIM=dim,
            WIDTH=max(LEAST, next_power(dim)), M=min(TILE, max(LEAST, next_power(heads))), N=TILE,
            SCORED=SCORED, PAGE_TOKENS=page_tokens, BLOCK=BLOCK_BYTES[pages.type], device=device,
        )  # fmt: skip
        if budget.block > 1 or budget.local:
            at_a_time = max(1, BLOCK // next_power(budget.block))
            launch(
                block_kernel, (divided(blocks, at_a_time), count * choices), scores, *seen[1:],
                of_blocks, first, capacity, blocks, CHOICES=choices, LOCAL=budget.local,
                TOKENS=budget.block, WIDTH=next_power(budget.block), BLOCKS=at_a_time,
                device=device,
            )  # fmt: skip
        launch(
            choose_kernel, (count * choices,), of_blocks, attended.page_table, *seen, cells, limits,
            first, rows * choices, blocks, attended.page_table.stride(0), MOST=budget.most,
            CHOICES=choices, TOKENS=budget.block, WIDTH=width, PAGE_TOKENS=page_tokens,
            BLOCK=min(BLOCK, next_power(capacity)), num_warps=8, device=device,
        )  # fmt: skip
    return plan_of(cells, limits, attended)


@triton.jit(do_not_specialize=["first_row"])
def score_kernel(
    queries, weights, keys, key_halves, page_table, row_slot, begins, ends, scores,
    first_row, capacity, table_stride, weight_stride,
    HEADS: tl.constexpr, WEIGHTED: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SCORED: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: SCORED positions each x rows. scores [rows from first_row on, choices, capacity]: only
    those of positions that a row sees are written. Unless WEIGHTED, each head has a choice."""
    place = tl.program_id(1).to(tl.int64)
    row = first_row + place
    begin, end = tl.load(begins + row), tl.load(ends + row)
    from_ = tl.maximum(tl.program_id(0) * SCORED, begin // N * N)
    to = tl.minimum(tl.program_id(0) * SCORED + SCORED, end)
    pages = page_table + tl.load(row_slot + row).to(tl.int64) * table_stride
    element = tl.arange(0, WIDTH)
    for block in range(from_, to, N):
        position = block + tl.arange(0, N)
        seen = (position >= begin) & (position < to)
        page = tl.load(pages + position // PAGE_TOKENS, mask=seen, other=0).to(tl.int64)
        cell = page * PAGE_TOKENS + position % PAGE_TOKENS
        key = load_rows(keys, key_halves, cell, seen, 0, WIDTH, DIM, DIM, BLOCK)
        score = tl.zeros((N,), tl.float32)
        for first_head in range(0, HEADS, M):
            head = first_head + tl.arange(0, M)
            at = (row * HEADS + head)[:, None] * DIM + element[None, :]
            mask = (head < HEADS)[:, None] & (element < DIM)[None, :]
            query = tl.load(queries + at, mask=mask, other=0.0)
            product = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")
            if WEIGHTED:
                weight = tl.load(weights + row * weight_stride + head, mask=head < HEADS, other=0.0)
                positive = tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL)
                score += tl.sum(positive * weight.to(tl.float32)[:, None], 0)
            else:
                at = (place * HEADS + head)[:, None] * capacity + position[None, :]
                tl.store(scores + at, product, mask=(head < HEADS)[:, None] & seen[None, :])
        if WEIGHTED:
            tl.store(scores + place * capacity + position, score, mask=seen)


@triton.jit(do_not_specialize=["first_row"])
def block_kernel(
    scores, begins, ends, of_blocks, first_row, capacity, blocks,
    CHOICES: tl.constexpr, LOCAL: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid: BLOCKS blocks each x choices. of_blocks [choices, blocks]: the highest scores of
    positions, infinity for the last LOCAL blocks that a row sees."""
    place = tl.program_id(1).to(tl.int64)
    row = first_row + place // CHOICES
    begin, end = tl.load(begins + row), tl.load(ends + row)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    offset = tl.arange(0, WIDTH)[None, :]
    position = block[:, None] * TOKENS + offset
    seen = (offset < TOKENS) & (position >= begin) & (position < end)
    score = tl.load(scores + place * capacity + position, mask=seen, other=float("-inf"))
    local = block > (end - 1) // TOKENS - LOCAL
    # The maximum drops NaN, which is the highest score.
    damaged = tl.max((score != score).to(tl.int32), 1) > 0
    highest = tl.where(damaged, float("nan"), tl.max(score, 1))
    highest = tl.where(local, float("inf"), highest)
    tl.store(of_blocks + place * blocks + block, highest, mask=block < blocks)


@triton.jit
def _orders(scores, block, inside):
    """Integers from 0 to 2**32 - 1 in the order of scores."""
    key = key_of(tl.load(scores + block, mask=inside, other=0.0))
    return key.to(tl.int64) + 2147483648


@triton.jit(do_not_specialize=["first_row", "choices"])
def choose_kernel(
    scores, page_table, row_slot, begins, ends, cells, limits, first_row, choices, blocks,
    table_stride,
    MOST: tl.constexpr, CHOICES: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: choices. scores [choices from row first_row on, blocks], of blocks of TOKENS
    positions."""
    place = tl.program_id(0).to(tl.int64)
    row, choice = first_row + place // CHOICES, first_row * CHOICES + place
    begin, end = tl.load(begins + row), tl.load(ends + row)
    first, last = begin // TOKENS, (end + TOKENS - 1) // TOKENS
    scores += place * blocks
    cells += choice * WIDTH
    pages = page_table + tl.load(row_slot + row).to(tl.int64) * table_stride
    chooses = last - first > MOST
    lowest, left = begin.to(tl.int64) * 0, begin * 0 + MOST  # of 0-dimensional tensors, for loops
    value = tl.arange(0, 2 * _VALUES)  # of a digit; the upper half is of other scores
    if chooses:
        for digit in tl.static_range(_DIGITS):
            counts = tl.zeros((2 * _VALUES,), tl.int32)
            for some in range(first, last, BLOCK):
                block = some + tl.arange(0, BLOCK)
                order = _orders(scores, block, block < last)
                rest = order >> (_DIGITS - 1 - digit) * _BITS
                counted = (block < last) & (rest >> _BITS == lowest)
                found = tl.where(counted, rest & (_VALUES - 1), 2 * _VALUES - 1)
                counts += tl.histogram(found.to(tl.int32), 2 * _VALUES)
            counts = tl.where(value < _VALUES, counts, 0)
            higher = tl.sum(counts, 0) - tl.cumsum(counts, 0)  # with a higher digit
            best = tl.max(tl.where((higher + counts >= left) & (value < _VALUES), value, 0), 0)
            left -= tl.sum(tl.where(value > best, counts, 0), 0)
            lowest = lowest * _VALUES + best
    written, equals = begin * 0, begin * 0
    for some in range(begin, end, BLOCK):
        position = some + tl.arange(0, BLOCK)
        inside = position < end
        taken = inside.to(tl.int32)
        if chooses:
            order = _orders(scores, position // TOKENS, inside)
            equal = inside & (order == lowest)
            starts = equal & ((position % TOKENS == 0) | (position == begin))
            fits = equals + tl.cumsum(starts.to(tl.int32), 0) <= left
            taken = ((inside & (order > lowest)) | (equal & fits)).to(tl.int32)
            equals += tl.sum(starts.to(tl.int32), 0)
        at = written + tl.cumsum(taken, 0) - 1
        page = tl.load(pages + position // PAGE_TOKENS, mask=inside, other=0)
        cell = (page * PAGE_TOKENS + position % PAGE_TOKENS) * CHOICES + (choice % CHOICES)
        tl.store(cells + at, cell.to(tl.int32), mask=taken > 0)
        written += tl.sum(taken, 0)
    for some in range(0, WIDTH, BLOCK):
        unused = some + tl.arange(0, BLOCK)
        tl.store(cells + unused, 0, mask=(unused >= written) & (unused < WIDTH))
    tl.store(limits + choice, choice.to(tl.int32))
    tl.store(limits + choices + choice, 0)
    tl.store(limits + 2 * choices + choice, written)
