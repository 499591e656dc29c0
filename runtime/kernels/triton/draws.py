"""Drawing the most likely token, or one of the most likely ones, on CUDA devices.

Two launches for all rows: the most likely tokens of each block of the vocabulary, then the draw
among those of all blocks. Weights of tokens are summed as integers, so the bits of a row depend on
nothing else.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from runtime.kernels.triton.launch import launch
from runtime.kernels.triton.words import ASSEMBLY

BLOCK = 8192  # tokens of a program
_LEAST = tl.constexpr(-(2**31))
_LEAST_RANK = tl.constexpr(-(2**63))
_ONE = tl.constexpr(2.0**40)  # as in runtime/worker/sampler_chain.py


def draw_top(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    floats: Tensor,
    ints: Tensor,
    history: Tensor,
    *,
    greedy: int,
    width: int,
) -> tuple[Tensor, Tensor]:
    """As `runtime.kernels.draws.draw_top`."""
    rows, vocab = logits.shape
    most = max(16, triton.next_power_of_2(width)) if greedy < rows else 1
    blocks = triton.cdiv(vocab, BLOCK)
    ranks = torch.empty(rows, blocks, most, dtype=torch.int64, device=logits.device)
    launch(
        rank_kernel, (blocks, rows), logits, slots, ints, ranks, vocab, logits.stride(0), greedy,
        ints.shape[1], MOST=most, BLOCK=BLOCK, num_warps=8, device=logits.device,
    )  # fmt: skip
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
    padded = triton.next_power_of_2(blocks)
    launch(
        draw_kernel, (rows,), ranks, slots, positions, floats, ints, history, tokens, finite,
        blocks, history.stride(0), greedy, vocab, floats.shape[1], ints.shape[1], MOST=most,
        BLOCKS=padded, num_warps=max(1, min(8, most * padded // 256)), enable_fp_fusion=False,
        device=logits.device,
    )  # fmt: skip
    return tokens, finite


@triton.jit(do_not_specialize=["greedy"])
def rank_kernel(
    logits, slots, ints, ranks, vocab, row_stride, greedy, int_columns,
    MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The tokens of a block that rank highest, in any order: as many as the row's top_k.

    A rank has a logit as an integer of the same order, NaN above all, then the token, smaller ones
    first.
    """
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * row_stride + token, mask=token < vocab, other=0.0) + 0.0
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(value != value, 0x7FFFFFFF, key)
    key = tl.where(token < vocab, key, _LEAST)
    rank = (key.to(tl.int64) << 32) + (0xFFFFFFFF - token.to(tl.int64))
    at = ranks + (row * tl.num_programs(0) + block) * MOST
    if row < greedy:
        tl.store(at, tl.max(rank, 0))
    else:
        wanted = tl.load(ints + tl.load(slots + row) * int_columns + 1)
        wanted = tl.minimum(wanted, MOST).to(tl.int32)
        # The largest key that has so many others at or above it, by bisection.
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
    """The token of a row, which is also written to its slot's tokens."""
    row = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    place = tl.arange(0, BLOCKS * MOST)
    top_k = tl.load(ints + slot * int_columns + 1)
    held = tl.where(row < greedy, 1, tl.minimum(top_k, MOST))
    exists = (place // MOST < blocks) & (place % MOST < held)
    rank = tl.load(ranks + row * blocks * MOST + place, mask=exists, other=_LEAST_RANK)
    best = tl.max(rank, 0)
    peak = _logit(best)
    token = _token(best)
    if row >= greedy:
        rank = _descending(rank)
        temperature = tl.load(floats + slot * float_columns)
        top_p = tl.load(floats + slot * float_columns + 1)
        min_p = tl.load(floats + slot * float_columns + 2)
        odds = _exponential(tl.div_rn(_logit(rank) - peak, tl.zeros_like(peak) + temperature))
        odds = tl.where(rank == _LEAST_RANK, 0.0, odds)
        weight = tl.where(place < top_k, (odds * _ONE).to(tl.int64), 0)
        sum = tl.cumsum(weight, 0)
        total = tl.sum(weight, 0)
        limit = (total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
        kept = (sum - weight <= limit) & (odds >= min_p)
        total = tl.max(tl.where(kept, sum, 0), 0)
        seed, dropped = tl.load(ints + slot * int_columns), tl.load(ints + slot * int_columns + 4)
        target = (_uniform(seed, position + dropped) * total).to(tl.int64)
        target = tl.minimum(target, total - 1)
        column = tl.sum((sum <= target).to(tl.int32), 0)
        drawn = tl.max(tl.where(place == column, rank, _LEAST_RANK), 0)
        token = _token(drawn)
    token = tl.maximum(tl.minimum(token, vocab - 1), 0)  # of rows that are not finite, too
    tl.store(tokens + row, token)
    tl.store(finite + row, (peak == peak) & (tl.abs(peak) != float("inf")))
    tl.store(history + slot * history_stride + position, token.to(tl.int32))


@triton.jit
def _logit(rank):
    key = (rank >> 32).to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _token(rank):
    return 0xFFFFFFFF - (rank & 0xFFFFFFFF)


@triton.jit
def _descending(ranks):
    """Sorted; they differ, or are the least. The interpreter sorts element by element."""
    if ASSEMBLY:
        return tl.sort(ranks, descending=True)
    else:
        place = tl.sum((ranks[None, :] > ranks[:, None]).to(tl.int32), 1)
        index = tl.arange(0, ranks.shape[0])
        here = place[None, :] == index[:, None]
        return tl.max(tl.where(here, ranks[None, :], _LEAST_RANK), 1)


@triton.jit
def _exponential(x):
    """With the error of torch's, not of the approximation that `tl.exp` is."""
    if ASSEMBLY:
        return libdevice.exp(x)
    else:
        return tl.exp(x)


@triton.jit
def _uniform(seed, position):
    """As `runtime.worker.sampler.uniforms`: float64."""
    golden: tl.constexpr = 0x9E3779B97F4A7C15
    state = _mixed(seed.to(tl.uint64) + golden)
    state = _mixed(state + (position.to(tl.uint64) + 1) * golden)
    return (state >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2**-53


@triton.jit
def _mixed(state):
    """The finaliser of splitmix64."""
    first: tl.constexpr = 0xBF58476D1CE4E5B9
    second: tl.constexpr = 0x94D049BB133111EB
    state = (state ^ (state >> 30)) * first
    state = (state ^ (state >> 27)) * second
    return state ^ (state >> 31)
