"""Drawing the most likely token, or one of the most likely ones, on CUDA devices.

Two launches for all rows: the most likely tokens of each block of the vocabulary, then the draw
among those of all blocks. Weights of tokens are summed as integers, so the bits of a row depend on
nothing else.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.draws import ONE, DrawnRows
from runtime.kernels.triton.curves import exponential
from runtime.kernels.triton.launch import divided, launch, next_power
from runtime.kernels.triton.random_numbers import uniform
from runtime.kernels.triton.token_ranks import (
    LEAST_KEY,
    LEAST_RANK,
    key_in,
    key_of,
    logit_of,
    rank_of,
    token_in,
)
from runtime.kernels.triton.words import ASSEMBLY

BLOCK = 8192  # tokens per program
_ONE = tl.constexpr(ONE)


def draw_top(inputs: DrawnRows, *, greedy: int, width: int) -> tuple[Tensor, Tensor]:
    """As `runtime.kernels.draws.draw_top`."""
    logits, floats, ints, history = inputs.logits, inputs.floats, inputs.ints, inputs.history
    rows, vocab = logits.shape
    most = max(16, next_power(width)) if greedy < rows else 1
    blocks = divided(vocab, BLOCK)
    ranks = torch.empty(rows, blocks, most, dtype=torch.int64, device=logits.device)
    launch(
        rank_kernel, (blocks, rows), logits, inputs.slots, ints, ranks, vocab, logits.stride(0),
        greedy, ints.shape[1], MOST=most, BLOCK=BLOCK, num_warps=8, device=logits.device,
    )  # fmt: skip
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
    padded = next_power(blocks)
    launch(
        draw_kernel, (rows,), ranks, inputs.slots, inputs.positions, floats, ints, history, tokens,
        finite, blocks, history.stride(0), greedy, vocab, floats.shape[1], ints.shape[1], MOST=most,
        BLOCKS=padded, num_warps=max(1, min(8, most * padded // 256)), enable_fp_fusion=False,
        device=logits.device,
    )  # fmt: skip
    return tokens, finite


@triton.jit(do_not_specialize=["greedy"])
def rank_kernel(
    logits, slots, ints, ranks, vocab, row_stride, greedy, int_columns,
    MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The tokens of a block that rank highest, in any order: as many as the row's top_k."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * row_stride + token, mask=token < vocab, other=0.0)
    key = tl.where(token < vocab, key_of(value), LEAST_KEY)
    rank = rank_of(key, token)
    at = ranks + (row * tl.num_programs(0) + block) * MOST
    if row < greedy:
        tl.store(at, tl.max(rank, 0))
    else:
        wanted = tl.load(ints + tl.load(slots + row) * int_columns + 1)
        wanted = tl.minimum(wanted, MOST).to(tl.int32)
        # Bisection for the largest key with at least this many keys at or above it.
        low, high = tl.min(key, 0).to(tl.int64), tl.max(key, 0).to(tl.int64)
        while low < high:
            middle = low + (high - low + 1) // 2
            enough = tl.sum((key >= middle.to(tl.int32)).to(tl.int32), 0) >= wanted
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
        above, equal = key > low.to(tl.int32), key == low.to(tl.int32)
        room = wanted - tl.sum(above.to(tl.int32), 0)
        kept = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
        place = tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(at + place, rank, mask=kept)


@triton.jit(do_not_specialize=["greedy"])
def draw_kernel(
    ranks, slots, positions, floats, ints, history, tokens, finite, blocks, history_stride, greedy,
    vocab, float_columns, int_columns, MOST: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid: rows. Draws a row's token and writes it to its slot's history."""
    row = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    place = tl.arange(0, BLOCKS * MOST)
    top_k = tl.load(ints + slot * int_columns + 1)
    held = tl.where(row < greedy, 1, tl.minimum(top_k, MOST))
    exists = (place // MOST < blocks) & (place % MOST < held)
    rank = tl.load(ranks + row * blocks * MOST + place, mask=exists, other=LEAST_RANK)
    best = tl.max(rank, 0)
    peak = logit_of(key_in(best))
    token = token_in(best)
    if row >= greedy:
        rank = _descending(rank)
        temperature = tl.load(floats + slot * float_columns)
        top_p = tl.load(floats + slot * float_columns + 1)
        min_p = tl.load(floats + slot * float_columns + 2)
        odds = exponential(
            tl.div_rn(logit_of(key_in(rank)) - peak, tl.zeros_like(peak) + temperature)
        )
        odds = tl.where(rank == LEAST_RANK, 0.0, odds)
        weight = tl.where(place < top_k, (odds * _ONE).to(tl.int64), 0)
        sum = tl.cumsum(weight, 0)
        total = tl.sum(weight, 0)
        limit = (total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
        kept = (sum - weight <= limit) & (odds >= min_p)
        total = tl.max(tl.where(kept, sum, 0), 0)
        seed, dropped = tl.load(ints + slot * int_columns), tl.load(ints + slot * int_columns + 4)
        target = (uniform(seed, position + dropped) * total).to(tl.int64)
        target = tl.minimum(target, total - 1)
        column = tl.sum((sum <= target).to(tl.int32), 0)
        drawn = tl.max(tl.where(place == column, rank, LEAST_RANK), 0)
        token = token_in(drawn)
    token = tl.maximum(tl.minimum(token, vocab - 1), 0)  # of rows that are not finite, too
    tl.store(tokens + row, token)
    tl.store(finite + row, (peak == peak) & (tl.abs(peak) != float("inf")))
    tl.store(history + slot * history_stride + position, token.to(tl.int32))


@triton.jit
def _descending(ranks):
    """Ranks in descending order. All are distinct except for the least possible rank."""
    if ASSEMBLY:
        return tl.sort(ranks, descending=True)
    else:
        place = tl.sum((ranks[None, :] > ranks[:, None]).to(tl.int32), 1)
        index = tl.arange(0, ranks.shape[0])
        here = place[None, :] == index[:, None]
        return tl.max(tl.where(here, ranks[None, :], LEAST_RANK), 1)
