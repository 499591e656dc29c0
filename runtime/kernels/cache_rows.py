"""Keys and values in the types of the cache, in torch; the C kernels convert while they read."""

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kv.cache_types import BLOCK_ELEMENTS, CacheType
from runtime.quant.block_types import block_type
from runtime.quant.weight import dequantize

_HALF_MOST = torch.finfo(torch.float16).max
# Numbers are clamped to these limits. The scale of a block is a half, which limits blocks too.
RANGES = {
    CacheType.FLOAT16: _HALF_MOST,
    CacheType.Q8_0: 127 * _HALF_MOST,
    CacheType.Q4_0: 8 * _HALF_MOST,
    CacheType.FP8: torch.finfo(torch.float8_e4m3fn).max,
}


def encode_rows(rows: Tensor, type: CacheType) -> Tensor:
    """[..., dim] -> [..., type.width(dim)] of `type.dtype`.

    Blocks are quantised as by the `gguf` package, the last one padded with zeros. Numbers beyond
    the range of the type become its largest; in blocks with NaN all elements become NaN.
    """
    if (most := RANGES.get(type)) is not None:
        rows = rows.float().clamp(-most, most)
    if not type.quantized:
        return rows.to(type.dtype)
    blocks = F.pad(rows.float(), (0, -rows.shape[-1] % BLOCK_ELEMENTS)).reshape(-1, BLOCK_ELEMENTS)
    packed = _q8_0(blocks) if type is CacheType.Q8_0 else _q4_0(blocks)
    return packed.view(*rows.shape[:-1], type.width(rows.shape[-1]))


def decode_rows(stored: Tensor, type: CacheType, dim: int) -> Tensor:
    """[..., type.width(dim)] -> float32 [..., dim]."""
    if not type.quantized:
        return stored.float()
    return dequantize(stored, block_type(type.name))[..., :dim]


def _q8_0(blocks: Tensor) -> Tensor:
    """[n, 32] -> uint8 [n, 34]; halves are rounded away from 0."""
    scales = blocks.abs().amax(dim=1, keepdim=True) / 127
    values = (blocks * _inverse(scales)).nan_to_num_(0.0).clamp_(-127, 127)
    whole = values.trunc()
    codes = whole + (values - whole).mul_(2).trunc_()
    return torch.cat([_halves(scales), codes.to(torch.int8).view(torch.uint8)], dim=1)


def _q4_0(blocks: Tensor) -> Tensor:
    """[n, 32] -> uint8 [n, 18]; the element furthest from 0 becomes -8, and 8 is added to all."""
    furthest = blocks.abs().argmax(dim=1, keepdim=True)
    scales = blocks.gather(1, furthest) / -8
    values = (blocks * _inverse(scales)).nan_to_num_(0.0).clamp_(-8, 8)
    codes = (values + 8.5).clamp_(max=15).to(torch.uint8)
    return torch.cat([_halves(scales), codes[:, :16] | codes[:, 16:] << 4], dim=1)


def _inverse(scales: Tensor) -> Tensor:
    """0 for scales of 0 and NaN."""
    return torch.where(scales.abs() > 0, scales.reciprocal(), 0.0)


def _halves(scales: Tensor) -> Tensor:
    return scales.to(torch.float16).view(torch.uint8)
