"""xIELU, an activation with four numbers of each layer."""

import torch
from torch import Tensor

from runtime.kernels.native import address, library
from runtime.kernels.triton.launch import has_kernels


def xielu(x: Tensor, *, positive: float, negative: float, beta: float, eps: float) -> Tensor:
    """positive x^2 + beta x where x is above 0, else negative (e^min(x, eps) - 1 - x) + beta x; in
    x's type, computed in float32. Huang and Schlag, "Deriving Activation Functions Using
    Integration"; eps is a negative number near 0.
    """
    if x.device.type != "cpu" or (kernels := library()) is None:
        if has_kernels(x.device):
            from runtime.kernels.triton import pointwise

            return pointwise.xielu(x, positive, negative, beta, eps)
        return xielu_twin(x, positive=positive, negative=negative, beta=beta, eps=eps)
    wide = x.float().contiguous()
    result = torch.empty_like(wide)
    kernels.caravan_xielu(
        address(wide, x.shape), wide.numel(), positive, negative, beta, eps, result.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return result.to(x.dtype)


def xielu_twin(x: Tensor, *, positive: float, negative: float, beta: float, eps: float) -> Tensor:
    """The specification of `xielu`."""
    wide = x.float()
    below = wide.clamp(max=eps).expm1_().sub_(wide).mul_(negative)
    curved = torch.where(wide > 0, wide.square().mul_(positive), below)
    return curved.add_(wide, alpha=beta).to(x.dtype)
