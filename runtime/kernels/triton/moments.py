"""Mean and standard deviation of rows on CUDA devices, one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.triton.launch import launch, next_power, with_adjacent_elements


@triton.jit
def moments_kernel(
    x, means, deviations, row_stride, N: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Grid: rows."""
    row, index = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    exists = index < N
    value = tl.load(x + row * row_stride + index, mask=exists, other=0.0).to(tl.float32)
    mean = tl.sum(value, 0) / N
    apart = tl.where(exists, value - mean, 0.0)
    tl.store(means + row, mean)
    tl.store(deviations + row, tl.sqrt_rn(tl.sum(apart * apart, 0) / N))


def row_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `runtime.kernels.moments.row_moments`."""
    x = with_adjacent_elements(x)
    (rows, n), result = x.shape, x.new_empty(2, len(x), 1, dtype=torch.float32)
    padded = next_power(n)
    launch(
        moments_kernel, (rows,), x, result[0], result[1], x.stride(0), N=n, PADDED=padded,
        num_warps=min(32, max(1, padded // 512)), device=x.device,
    )  # fmt: skip
    return result[0], result[1]
