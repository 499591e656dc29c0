"""Logarithms of sums of exponentials on CUDA devices, one launch for all rows."""

import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.triton.curves import exponential
from runtime.kernels.triton.launch import launch, with_adjacent_elements

SIZE = 2048  # elements that a program reads at once


@triton.jit
def log_sum_kernel(logits, result, vocab, row_stride, SIZE: tl.constexpr):
    """Grid: rows. Each of SIZE lanes keeps the maximum and the relative sum of its elements."""
    row, index = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    most, total = tl.full((SIZE,), float("-inf"), tl.float32), tl.zeros((SIZE,), tl.float32)
    for begin in range(0, vocab, SIZE):
        at = logits + row * row_stride + begin + index
        value = tl.load(at, mask=begin + index < vocab, other=float("-inf"))
        higher = tl.maximum(most, value)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * exponential(most - base) + exponential(value - base)
        most = higher
    top = tl.max(most, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    found = base + tl.log(tl.sum(total * exponential(most - base), 0))
    tl.store(result + row, tl.where(top == float("inf"), top, found))


def log_sums(logits: Tensor) -> Tensor:
    """As `runtime.kernels.draws.log_sums`."""
    logits = with_adjacent_elements(logits)
    result = logits.new_empty(len(logits), 1)
    launch(
        log_sum_kernel, (len(logits),), logits, result, logits.shape[1], logits.stride(0),
        SIZE=SIZE, num_warps=8, device=logits.device,
    )  # fmt: skip
    return result
