"""Drawing among all tokens on CUDA devices, without sorting them.

Three launches for all rows: the largest and least logits of each block of the vocabulary; the sums
of weights of each block and, for rows whose filters need the order of logits, of each bucket of
similar logits; the draw. Weights are summed as integers, so the order of addition does not matter.

In the order of logits, each filter and the draw itself ends at the token where a running sum
exceeds a goal. The sums give the bucket of that token; the bucket's tokens are collected, and the
token's logit is found among them by bisection.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.draws import ONE, DrawnRows
from runtime.kernels.triton.curves import exponential
from runtime.kernels.triton.launch import divided, launch, next_power
from runtime.kernels.triton.random_numbers import uniform
from runtime.kernels.triton.token_ranks import LEAST_KEY, key_of, logit_of

BLOCK = 4096  # tokens per program
BUCKETS = 2048
TILE = 1024  # collected tokens that are compared at a time
_ONE = tl.constexpr(ONE)
_DEEPEST = tl.constexpr(28.0)  # e**-28 * ONE < 1
_LARGEST_KEY = tl.constexpr(2**31 - 1)


def draw_all(inputs: DrawnRows, *, ordered: int) -> tuple[Tensor, Tensor]:
    """As `runtime.kernels.draws.draw_all`."""
    logits, slots, history = inputs.logits, inputs.slots, inputs.history
    floats, ints = inputs.floats, inputs.ints
    (rows, vocab), device = logits.shape, logits.device
    blocks = divided(vocab, BLOCK)
    peaks = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    lows = torch.empty(rows, blocks, dtype=torch.float32, device=device)
    sums = torch.empty(rows, blocks, dtype=torch.int64, device=device)
    tables = torch.empty(ordered, 2, BUCKETS, dtype=torch.int64, device=device)
    launch(
        extent_kernel, (blocks, rows), logits, peaks, lows, tables, vocab, logits.stride(0),
        ordered, BLOCK=BLOCK, BUCKETS=BUCKETS, num_warps=8, device=device,
    )  # fmt: skip
    padded = next_power(blocks)
    launch(
        weight_kernel, (blocks, rows), logits, slots, floats, ints, peaks, lows, sums, tables,
        vocab, logits.stride(0), ordered, floats.shape[1], ints.shape[1], BLOCK=BLOCK,
        BLOCKS=padded, BUCKETS=BUCKETS, num_warps=8, enable_fp_fusion=False, device=device,
    )  # fmt: skip
    candidates = torch.empty(ordered, vocab, dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    finite = torch.empty(rows, dtype=torch.bool, device=device)
    launch(
        threshold_kernel, (rows,), logits, slots, inputs.positions, floats, ints, history, tokens,
        finite, peaks, lows, sums, tables, candidates, blocks, vocab, logits.stride(0),
        history.stride(0), ordered, floats.shape[1], ints.shape[1], BLOCK=BLOCK, BLOCKS=padded,
        BUCKETS=BUCKETS, TILE=TILE, num_warps=16, enable_fp_fusion=False, device=device,
    )  # fmt: skip
    return tokens, finite


@triton.jit(do_not_specialize=["ordered"])
def extent_kernel(
    logits, peaks, lows, tables, vocab, row_stride, ordered,
    BLOCK: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """The largest key and the least finite logit of a block; also zeroes the sums of buckets."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    value = tl.load(logits + row * row_stride + token, mask=inside, other=float("-inf"))
    at = row * tl.num_programs(0) + block
    tl.store(peaks + at, tl.max(tl.where(inside, key_of(value), LEAST_KEY), 0))
    is_finite = tl.abs(value) < float("inf")
    tl.store(lows + at, tl.min(tl.where(is_finite, value, float("inf")), 0))
    if (block == 0) & (row < ordered):
        place = tl.arange(0, 2 * BUCKETS)
        tl.store(tables + row * 2 * BUCKETS + place, tl.zeros_like(place).to(tl.int64))


@triton.jit(do_not_specialize=["ordered"], do_not_specialize_on_alignment=["slots"])
def weight_kernel(
    logits, slots, floats, ints, peaks, lows, sums, tables, vocab, row_stride, ordered,
    float_columns, int_columns, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """The sum of a block's weights that min_p keeps. For ordered rows, also adds each bucket's
    weights to the first half of the row's table and, if the row has a top_k, its number of tokens
    to the second half."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot, blocks = tl.load(slots + row), tl.num_programs(0)
    temperature = tl.load(floats + slot * float_columns)
    peak, reach = _extent(peaks, lows, row, blocks, temperature, BLOCKS)
    token = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * row_stride + token, mask=token < vocab, other=float("-inf"))
    odds = tl.where(_is_finite(peak), _odds(value, peak, temperature), 0.0)
    weight = _weight(odds)
    kept = odds >= tl.load(floats + slot * float_columns + 2)
    tl.store(sums + row * blocks + block, tl.sum(tl.where(kept, weight, 0), 0))
    if row < ordered:
        cell = tables + row * 2 * BUCKETS + _bucket(value, peak, reach, BUCKETS)
        weighs = weight > 0
        tl.atomic_add(cell, weight, mask=weighs, sem="relaxed")
        limited = tl.load(ints + slot * int_columns + 1) < vocab
        one = weighs.to(tl.int64)
        tl.atomic_add(cell + BUCKETS, one, mask=weighs & limited, sem="relaxed")


@triton.jit(do_not_specialize=["ordered"], do_not_specialize_on_alignment=["slots", "positions"])
def threshold_kernel(
    logits, slots, positions, floats, ints, history, tokens, finite, peaks, lows, sums, tables,
    candidates, blocks, vocab, row_stride, history_stride, ordered, float_columns, int_columns,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BUCKETS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid: rows. Draws a row's token and writes it to its slot's history."""
    row = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    logits += row * row_stride
    floats += slot * float_columns
    ints += slot * int_columns
    temperature = tl.load(floats)
    peak, reach = _extent(peaks, lows, row, blocks, temperature, BLOCKS)
    noise = uniform(tl.load(ints), position + tl.load(ints + 4))
    index = tl.arange(0, BLOCKS)
    parts = tl.load(sums + row * blocks + index, mask=index < blocks, other=0)
    token = tl.zeros_like(position)
    if _is_finite(peak):
        if row < ordered:
            token = _ordered_token(
                logits, tables + row * 2 * BUCKETS, candidates + row * vocab, tl.load(ints + 1),
                tl.load(floats + 1), tl.sum(parts, 0), noise, peak, reach, temperature, vocab,
                BLOCK, BUCKETS, TILE,
            )  # fmt: skip
        else:
            goal = _target(noise, tl.sum(parts, 0))
            ends = tl.cumsum(parts, 0)
            block = tl.sum((ends <= goal).to(tl.int32), 0)
            goal -= tl.sum(tl.where(index < block, parts, 0), 0)
            place = block * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(logits + place, mask=place < vocab, other=float("-inf"))
            odds = _odds(value, peak, temperature)
            weight = tl.where(odds >= tl.load(floats + 2), _weight(odds), 0)
            column = tl.sum((tl.cumsum(weight, 0) <= goal).to(tl.int32), 0)
            token = (block * BLOCK + column).to(tl.int64)
    token = tl.maximum(tl.minimum(token, vocab - 1), 0)
    tl.store(tokens + row, token)
    tl.store(finite + row, _is_finite(peak))
    tl.store(history + slot * history_stride + position, token.to(tl.int32))


@triton.jit
def _ordered_token(
    logits, table, candidates, top_k, top_p, possible, noise, peak, reach, temperature, vocab,
    BLOCK: tl.constexpr, BUCKETS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The token drawn in the order of logits. `possible`: sum of the weights that min_p keeps."""
    index = tl.arange(0, BUCKETS)
    total = tl.sum(tl.load(table + index), 0)
    found = tl.zeros_like(vocab)
    key, order = tl.zeros_like(total), tl.zeros_like(total)
    for stage in range(3):  # top_k counts tokens; top_p and the draw sum their weights
        counting = stage == 0
        total = tl.where(stage == 2, tl.minimum(total, possible), total)
        measures = tl.load(table + tl.where(counting, BUCKETS, 0) + index)
        goal = tl.where(counting, top_k - 1, (total.to(tl.float64) * top_p).to(tl.int64))
        goal = tl.where(stage == 2, _target(noise, total), goal)
        if goal < tl.where(counting, tl.sum(measures, 0), total):
            bucket = tl.sum((tl.cumsum(measures, 0) <= goal).to(tl.int32), 0)
            goal -= tl.sum(tl.where(index < bucket, measures, 0), 0)
            reached = tl.sum(tl.load(table + index, mask=index < bucket, other=0), 0)
            found = _collect(logits, candidates, bucket, peak, reach, vocab, BLOCK, BUCKETS)
            key = _key_beyond(logits, candidates, found, goal, counting, peak, temperature, TILE)
            above, weights_above = _sums_from(
                logits, candidates, found, key + 1, counting, peak, temperature, TILE
            )
            weight = _weight(_odds(logit_of(key.to(tl.int32)), peak, temperature))
            order = (goal - above) // tl.where(counting, 1, tl.maximum(weight, 1))
            reached += weights_above + (order + 1) * weight
            total = tl.where(stage < 2, tl.minimum(total, reached), total)
    return _equal_token(logits, candidates, found, key, order, TILE)


@triton.jit
def _collect(
    logits, candidates, bucket, peak, reach, vocab, BLOCK: tl.constexpr, BUCKETS: tl.constexpr
):
    """Writes the tokens of a bucket, in ascending order, and returns their number.

    Tokens without a weight that are deeper than `reach` are left out.
    """
    found = tl.zeros_like(vocab)
    tl.debug_barrier()  # the program's earlier candidates are read
    for begin in range(0, vocab, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        value = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
        inside = (_bucket(value, peak, reach, BUCKETS) == bucket) & (peak - value <= reach)
        inside &= token < vocab
        place = found + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(candidates + place, token, mask=inside)
        found += tl.sum(inside.to(tl.int32), 0)
    tl.debug_barrier()
    return found


@triton.jit
def _key_beyond(logits, candidates, found, goal, counting, peak, temperature, TILE: tl.constexpr):
    """The largest key such that the candidates at or above it exceed the goal."""
    low, high = tl.zeros_like(goal) + _LARGEST_KEY, tl.zeros_like(goal) + LEAST_KEY
    for begin in range(0, found, TILE):
        _, value = _candidates(logits, candidates, begin, found, TILE)
        key = key_of(value)
        low = tl.minimum(low, tl.min(tl.where(value == value, key, _LARGEST_KEY), 0))
        high = tl.maximum(high, tl.max(tl.where(value == value, key, LEAST_KEY), 0))
    while low < high:
        middle = low + (high - low + 1) // 2
        sum, _ = _sums_from(logits, candidates, found, middle, counting, peak, temperature, TILE)
        low = tl.where(sum > goal, middle, low)
        high = tl.where(sum > goal, high, middle - 1)
    return low


@triton.jit
def _sums_from(logits, candidates, found, least, counting, peak, temperature, TILE: tl.constexpr):
    """The sum that is compared with the goal, and the sum of weights, of the candidates with keys
    of at least `least`."""
    least = logit_of(least.to(tl.int32))
    sum, weights = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for begin in range(0, found, TILE):
        _, value = _candidates(logits, candidates, begin, found, TILE)
        weight = _weight(tl.where(value >= least, _odds(value, peak, temperature), 0.0))
        weights += tl.sum(weight, 0)
        sum += tl.sum(tl.where(counting, (weight > 0).to(tl.int64), weight), 0)
    return sum, weights


@triton.jit
def _equal_token(logits, candidates, found, key, order, TILE: tl.constexpr):
    """The token of candidate number `order` among those with this key."""
    logit = logit_of(key.to(tl.int32))
    token, before = tl.zeros([], tl.int32), tl.zeros([], tl.int64)
    for begin in range(0, found, TILE):
        each, value = _candidates(logits, candidates, begin, found, TILE)
        equal = (value == logit).to(tl.int64)
        chosen = (equal > 0) & (before + tl.cumsum(equal, 0) - 1 == order)
        token = tl.maximum(token, tl.max(tl.where(chosen, each, 0), 0))
        before += tl.sum(equal, 0)
    return token.to(tl.int64)


@triton.jit
def _candidates(logits, candidates, begin, found, TILE: tl.constexpr):
    """Tokens and logits of TILE candidates; logits after the last one are NaN."""
    place = begin + tl.arange(0, TILE)
    token = tl.load(candidates + place, mask=place < found, other=0)
    return token, tl.load(logits + token, mask=place < found, other=float("nan"))


@triton.jit
def _weight(odds):
    return (odds * _ONE).to(tl.int64)


@triton.jit
def _odds(value, peak, temperature):
    depth = value - peak
    return exponential(tl.div_rn(depth, tl.zeros_like(depth) + temperature))


@triton.jit
def _target(noise, total):
    return tl.minimum((noise * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _extent(peaks, lows, row, blocks, temperature, BLOCKS: tl.constexpr):
    """The largest logit of a row, and the depth below it to the lowest logit with a weight."""
    index = tl.arange(0, BLOCKS)
    at, exists = row * blocks + index, index < blocks
    peak = logit_of(tl.max(tl.load(peaks + at, mask=exists, other=LEAST_KEY), 0))
    low = tl.min(tl.load(lows + at, mask=exists, other=float("inf")), 0)
    reach = tl.minimum(temperature * _DEEPEST, peak - low)
    return peak, tl.minimum(reach, 3.0e38)


@triton.jit
def _bucket(value, peak, reach, BUCKETS: tl.constexpr):
    """The bucket of a logit that is at most `reach` below a finite peak."""
    last: tl.constexpr = BUCKETS - 1.0
    scale = tl.div_rn(tl.zeros_like(reach) + last, tl.maximum(reach, 1.0e-30))
    return tl.minimum((peak - value) * scale, last).to(tl.int32)


@triton.jit
def _is_finite(value):
    return tl.abs(value) < float("inf")
