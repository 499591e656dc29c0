"""The largest numbers of rows on CUDA devices, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.triton.launch import launch, next_power
from runtime.kernels.triton.token_ranks import LEAST_KEY, key_of


def highest(values: Tensor, count: int) -> Tensor:
    """As `runtime.kernels.selection.highest`."""
    rows, n = values.shape
    wide = values.float().contiguous()
    result = torch.empty(rows, count, dtype=torch.int64, device=values.device)
    launch(
        highest_kernel, (rows,), wide, result, n, COUNT=count, PADDED=next_power(n),
        device=values.device,
    )  # fmt: skip
    return result


@triton.jit
def highest_kernel(values, result, n, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, PADDED)
    value = tl.load(values + row * n + index, mask=index < n, other=0.0)
    key = tl.where(index < n, key_of(value), LEAST_KEY)
    for place in range(COUNT):
        best = tl.max(key, 0)
        first = tl.min(tl.where(key == best, index, PADDED), 0)
        tl.store(result + row * COUNT + place, first.to(tl.int64))
        key = tl.where(index == first, LEAST_KEY, key)
