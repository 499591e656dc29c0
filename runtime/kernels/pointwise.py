"""Norms, rotary embeddings and gates: one row at a time, whatever else is in the batch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.native import address, library


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., hidden], weight [hidden] -> x / sqrt(mean(x^2) + eps) * weight, in x's type.

    Zhang and Sennrich, "Root Mean Square Layer Normalization". Computed in float32.
    """
    if x.device.type != "cpu" or (kernels := library()) is None:
        return rms_norm_twin(x, weight, eps)
    wide, factor, n = x.float().contiguous(), weight.float().contiguous(), x.shape[-1]
    result = torch.empty_like(wide)
    kernels.caravan_rms_norm(
        address(wide), address(factor), eps, wide.numel() // n, n, address(result),
        torch.get_num_threads(),
    )  # fmt: skip
    return result.to(x.dtype)


def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of each head by the angle of frequency i.

    x [tokens, heads, dim], cos and sin [tokens, rotated / 2] -> like x. Dimensions from `rotated`
    on pass unchanged. Su et al., "RoFormer", in the order of the original weights.
    """
    if x.device.type != "cpu" or (kernels := library()) is None:
        return rope_interleaved_twin(x, cos, sin)
    wide, cos, sin = (tensor.float().contiguous() for tensor in (x, cos, sin))
    result = torch.empty_like(wide)
    kernels.caravan_rope_interleaved(
        address(wide), address(cos), address(sin), *wide.shape, cos.shape[-1], address(result),
        torch.get_num_threads(),
    )  # fmt: skip
    return result.to(x.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [..., n] -> silu(gate) * up, in gate's type; computed in float32."""
    if gate.device.type != "cpu" or (kernels := library()) is None:
        return silu_mul_twin(gate, up)
    wide, other = gate.float().contiguous(), up.float().contiguous()
    result = torch.empty_like(wide)
    kernels.caravan_silu_mul(
        address(wide), address(other), wide.numel(), address(result), torch.get_num_threads()
    )
    return result.to(gate.dtype)


def rms_norm_twin(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The specification of `rms_norm`."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def rope_interleaved_twin(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The specification of `rope_interleaved`."""
    rotated = 2 * cos.shape[-1]
    even, odd = x[..., 0:rotated:2].float(), x[..., 1:rotated:2].float()
    cos, sin = cos.float().unsqueeze(-2), sin.float().unsqueeze(-2)
    pairs = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return torch.cat([pairs.flatten(-2).to(x.dtype), x[..., rotated:]], dim=-1)


def silu_mul_twin(gate: Tensor, up: Tensor) -> Tensor:
    """The specification of `silu_mul`."""
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)
