"""Turns quantised weights of checkpoints into GGUF blocks with exactly the same numbers."""

import torch
from torch import Tensor

_BLOCK, _NVFP4_BLOCK, _NVFP4_GROUP = 32, 64, 16
_SIGN = 128


def q4_0_rows(weight: Tensor, scale: Tensor) -> Tensor:
    """weight [out, in] (0 to 15 for -8 to 7), scale [out, groups] -> uint8 [out, row bytes]."""
    low, high = weight.unflatten(1, (-1, 2, _BLOCK // 2)).byte().unbind(2)
    return _with_scales(low | high << 4, scale)


def q8_0_rows(weight: Tensor, scale: Tensor) -> Tensor:
    """weight [out, in] (-128 to 127), scale [out, groups] -> uint8 [out, row bytes]."""
    return _with_scales(weight.char().unflatten(1, (-1, _BLOCK)).view(torch.uint8), scale)


def mxfp4_rows(packed: Tensor, exponents: Tensor) -> Tensor:
    """packed uint8 [rows, n, 16] or [rows, n * 16], exponents uint8 [rows, n] -> uint8
    [rows, n * 17].

    A stored byte holds two adjacent weights. A GGUF block is the exponent and 16 bytes, with the
    first 16 weights in the low nibbles and the others in the high ones.
    """
    packed = packed.reshape(*exponents.shape, _BLOCK // 2)
    return torch.cat([exponents.unsqueeze(-1), _halved(packed)], -1).flatten(-2)


def nvfp4_rows(packed: Tensor, scale: Tensor) -> Tensor:
    """packed uint8 [out, in / 2], the first weight in the low bits, scale E4M3 [out, in / 16] ->
    uint8 [out, row bytes]: for every 64 weights four scales, then the weights of each scale."""
    scales = scale.view(torch.uint8)
    groups = packed.unflatten(1, (-1, _NVFP4_GROUP // 2))
    groups = torch.where(scales.unsqueeze(-1) < _SIGN, groups, groups ^ 0x88)
    weights = _halved(groups).unflatten(1, (-1, _NVFP4_BLOCK // _NVFP4_GROUP)).flatten(2)
    magnitudes = (scales & _SIGN - 1).unflatten(1, (-1, _NVFP4_BLOCK // _NVFP4_GROUP))
    return torch.cat([magnitudes, weights], -1).flatten(1)


def scales_blocks(scale: tuple[int, ...], weight: tuple[int, ...]) -> bool:
    """Whether each of the scales [out, groups] of a weight [out, in] covers whole blocks of 32
    columns."""
    if len(weight) != 2 or len(scale) != 2 or scale[0] != weight[0]:
        return False
    return weight[1] % (scale[1] * _BLOCK) == 0


def are_halves(scale: Tensor) -> bool:
    """Whether F16 represents all these numbers exactly."""
    return torch.equal(scale.half().to(scale.dtype), scale)


def _with_scales(blocks: Tensor, scale: Tensor) -> Tensor:
    """blocks uint8 [out, n, bytes], scale [out, groups] -> uint8 [out, row bytes]; a group is a run
    of adjacent blocks."""
    scales = scale.half().repeat_interleave(blocks.shape[1] // scale.shape[1], dim=1)
    return torch.cat([scales.unsqueeze(-1).view(torch.uint8), blocks], -1).flatten(1)


def _halved(packed: Tensor) -> Tensor:
    """uint8 [..., n], two adjacent weights in a byte -> [..., n], the first half of the weights in
    the low nibbles, the other in the high ones."""
    weights = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    first, second = weights.chunk(2, dim=-1)
    return first | second << 4
