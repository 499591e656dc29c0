"""DRY on CUDA devices, in two launches: penalties of tokens, and their subtraction."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.repetitions import LARGEST_PENALTY, LONGEST_REPEAT, RepeatedRows
from runtime.kernels.triton.launch import divided, launch

COLUMNS = 512  # earlier tokens that a program compares with
BLOCK = 4096  # tokens of the vocabulary that a program subtracts from
_LONGEST, _LARGEST = tl.constexpr(LONGEST_REPEAT), tl.constexpr(LARGEST_PENALTY)


def penalise_repetitions(logits: Tensor, repeated: RepeatedRows) -> None:
    """As `runtime.kernels.repetitions.penalise_repetitions`."""
    rows, (_, vocab), device = repeated.rows, logits.shape, logits.device
    history, breakers = repeated.history, repeated.breakers
    penalties = torch.zeros(len(rows), vocab, dtype=torch.float32, device=device)
    launch(
        repetition_kernel, (divided(repeated.window, COLUMNS), len(rows)), rows, repeated.slots,
        repeated.positions, history, repeated.floats, repeated.ints, breakers,
        penalties.view(torch.int32), vocab, history.stride(0), breakers.stride(0), COLUMNS=COLUMNS,
        num_warps=4, device=device,
    )  # fmt: skip
    launch(
        subtraction_kernel, (divided(vocab, BLOCK), len(rows)), rows, penalties, logits, vocab,
        logits.stride(0), BLOCK=BLOCK, num_warps=8, device=device,
    )  # fmt: skip


@triton.jit
def repetition_kernel(
    rows, slots, positions, history, floats, ints, breakers, penalties, vocab, history_stride,
    breakers_stride, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of COLUMNS earlier tokens x rows. Writes the largest penalty of each token, as
    an integer whose bits are those of the float: both have the same order."""
    number = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + number)
    slot = tl.load(slots + row)
    allowed, steepest = tl.load(ints + slot * 3), tl.load(ints + slot * 3 + 2)
    count = tl.minimum(tl.load(positions + row), tl.load(ints + slot * 3 + 1))
    # The token at distance n from the end is at newest - n.
    newest = history + slot * history_stride + tl.load(positions + row) - 1
    breakers += slot * breakers_stride
    back = tl.arange(0, _LONGEST)
    ends = (back >= count) | _breaks(breakers, tl.load(newest - back, mask=back < count, other=0))
    limit = tl.min(tl.where(ends, back, _LONGEST), 0)
    reach = tl.minimum(limit, allowed + steepest)
    column = tl.program_id(0) * COLUMNS + 1 + tl.arange(0, COLUMNS)
    exists = column < count
    step, length = tl.zeros_like(limit), tl.zeros([COLUMNS], tl.int32)
    alive = exists
    while (step < reach) & (tl.max(alive.to(tl.int32), 0) > 0):
        there = alive & (column + step < count)
        earlier = tl.load(newest - column - step, mask=there, other=-1)
        alive = there & (earlier == tl.load(newest - step))
        length += alive.to(tl.int32)
        step += 1
    # The token after the match is the one that would continue the repetition.
    token = tl.load(newest - column + 1, mask=exists, other=0)
    counts = exists & (length >= allowed) & (limit >= allowed) & (count > allowed)
    counts &= ~_breaks(breakers, token)
    multiplier = tl.load(floats + slot * 2).to(tl.float64)
    base = tl.load(floats + slot * 2 + 1).to(tl.float64)
    exponent = tl.minimum(length - allowed, steepest).to(tl.float64)
    penalty = tl.minimum(multiplier * tl.exp(exponent * tl.log(base)), _LARGEST).to(tl.float32)
    at = penalties + number * vocab + token
    tl.atomic_max(at, penalty.to(tl.int32, bitcast=True), mask=counts, sem="relaxed")


@triton.jit
def _breaks(breakers, token):
    """Whether tokens [n] are sequence breakers."""
    return ((tl.load(breakers + (token >> 5)) >> (token & 31)) & 1) != 0


@triton.jit
def subtraction_kernel(rows, penalties, logits, vocab, row_stride, BLOCK: tl.constexpr):
    """Grid: blocks of tokens x rows."""
    number = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    at = logits + tl.load(rows + number) * row_stride + token
    penalty = tl.load(penalties + number * vocab + token, mask=inside, other=0.0)
    tl.store(at, tl.load(at, mask=inside, other=0.0) - penalty, mask=inside)
