"""Mean and standard deviation of rows."""

import torch
from torch import Tensor

from runtime.kernels.triton.launch import has_kernels


def row_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, n] -> the mean and the standard deviation of each row, float32 [rows, 1] each.

    The deviation is that of the row itself (divided by n). The bits of a row do not depend on the
    number of rows, as those of torch's sums on CUDA devices do.
    """
    if has_kernels(x.device):
        from runtime.kernels.triton import moments

        return moments.row_moments(x)
    return row_moments_twin(x)


def row_moments_twin(x: Tensor) -> tuple[Tensor, Tensor]:
    """The specification of `row_moments`."""
    deviation, mean = torch.std_mean(x.float(), dim=-1, correction=0, keepdim=True)
    return mean, deviation
