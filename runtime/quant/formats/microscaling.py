"""Four-bit floats in blocks that share a float of eight bits: MXFP4 and NVFP4."""

import torch
from torch import Tensor

from runtime.quant.formats.bits import fields, looked_up

# The values of E2M1, doubled; the scales below are therefore halved.
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def mxfp4(blocks: Tensor) -> Tensor:
    """A byte of exponent, nibbles: low ones are elements 0..15, high ones 16..31."""
    return _values(blocks[:, 1:].unsqueeze(1)).view(-1, 32).mul_(power_of_two(blocks[:, :1]))


def mxfp4_pairs(blocks: Tensor) -> Tensor:
    """As MXFP4, but byte k holds element 2k in its low nibble and 2k + 1 in its high one."""
    values = _values(blocks[:, 1:].unsqueeze(2))
    return values.view(-1, 32).mul_(power_of_two(blocks[:, :1]))


def nvfp4(blocks: Tensor) -> Tensor:
    """Four scales in unsigned E4M3, then for each 8 bytes of nibbles: eight low, eight high."""
    scale = looked_up(_E4M3_HALVED, blocks[:, :4])
    return _values(blocks[:, 4:].view(-1, 4, 8)).view(-1, 4, 16).mul_(scale.unsqueeze(2))


def power_of_two(byte: Tensor) -> Tensor:
    """float32 2^(byte - 128) from its bits; the two smallest are denormal."""
    exponent = byte.int()
    bits = torch.where(exponent < 2, (exponent + 1) << 21, (exponent - 1) << 23)
    return bits.view(torch.float32)


def _values(packed: Tensor) -> Tensor:
    """uint8 [n, groups, width] -> float32 [n, groups, 2, width]: low nibbles, then high ones."""
    return looked_up(E2M1, fields(packed, 2, 4))


def _e4m3(byte: int) -> float:
    """uint8 E4M3 without a sign -> float32; 0x7F, which would be NaN, is 0."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte == 0x7F:
        return 0.0
    return mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


_E4M3_HALVED = tuple(0.5 * _e4m3(byte) for byte in range(256))
