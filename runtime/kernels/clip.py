"""Limits of the elements of a tensor."""

import torch
from torch import Tensor

from runtime.kernels.native import library


def clip_(x: Tensor, bound: float) -> Tensor:
    """x [tokens, n], its elements limited to the range from -bound to bound in place; NaN
    remains."""
    fits = x.dtype == torch.float32 and x.dim() == 2 and x.stride(1) == 1
    if x.device.type != "cpu" or not fits or (kernels := library()) is None:
        return clip_twin_(x, bound)
    rows, n = x.shape
    kernels.caravan_clip(x.data_ptr(), x.stride(0), bound, rows, n, torch.get_num_threads())
    return x


def clip_twin_(x: Tensor, bound: float) -> Tensor:
    """The specification of `clip_`."""
    return x.clamp_(-bound, bound)
