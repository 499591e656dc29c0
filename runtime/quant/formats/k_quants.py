"""The K-quants: blocks of 256 weights in groups, whose scales are quantised themselves."""

import torch
from torch import Tensor

from runtime.quant.formats.bits import fields, halves, signed


def q2_k(blocks: Tensor) -> Tensor:
    """16 bytes of scale and minimum of a group of 16, 64 bytes of bit pairs, two halves."""
    scale = halves(blocks[:, 80:82]) * (blocks[:, :16] & 0x0F).float()
    minimum = halves(blocks[:, 82:]) * (blocks[:, :16] >> 4).float()
    values = fields(blocks[:, 16:80].view(-1, 2, 32), 4, 2).reshape(-1, 16, 16)
    return values.float().mul_(scale.unsqueeze(2)).sub_(minimum.unsqueeze(2))


def q3_k(blocks: Tensor) -> Tensor:
    """32 bytes of high bits, 64 of bit pairs, 12 of sixteen 6-bit scales, a half."""
    low = fields(blocks[:, None, 96:104], 2, 4).reshape(-1, 16)
    high = fields(blocks[:, None, 104:108], 4, 2).reshape(-1, 16)
    scale = halves(blocks[:, 108:]) * (signed(low | (high << 4)) - 32).float()
    pairs = fields(blocks[:, 32:96].view(-1, 2, 32), 4, 2).reshape(-1, 16, 16)
    third = fields(blocks[:, None, :32], 8, 1).reshape(-1, 16, 16)
    return (signed(pairs | (third << 2)) - 4).float().mul_(scale.unsqueeze(2))


def q4_k(blocks: Tensor) -> Tensor:
    """After the scales, four runs of 32 bytes, each two groups of 32: low nibbles, high nibbles."""
    return _affine(blocks, fields(blocks[:, 16:].view(-1, 4, 32), 2, 4))


def q5_k(blocks: Tensor) -> Tensor:
    """As Q4_K, with a fifth bit per weight in 32 bytes before the nibbles: bit g for group g."""
    high = fields(blocks[:, None, 16:48], 8, 1)
    low = fields(blocks[:, 48:].view(-1, 4, 32), 2, 4)
    return _affine(blocks, low.reshape(-1, 8, 32) | (high.reshape(-1, 8, 32) << 4))


def q6_k(blocks: Tensor) -> Tensor:
    """128 bytes of low nibbles, 64 of high bit pairs, 16 signed scales, a half."""
    low = fields(blocks[:, :128].view(-1, 2, 64), 2, 4)
    high = fields(blocks[:, 128:192].view(-1, 2, 32), 4, 2)
    values = signed(low.reshape(-1, 8, 32) | (high.reshape(-1, 8, 32) << 4)) - 32
    scale = halves(blocks[:, 208:]) * signed(blocks[:, 192:208]).float()
    return values.reshape(-1, 16, 16).float().mul_(scale.unsqueeze(2))


def _affine(blocks: Tensor, values: Tensor) -> Tensor:
    """Halves d and dmin, 12 bytes of scales: weights are d * scale * value - dmin * minimum."""
    scale, minimum = _scales(blocks[:, 4:16])
    scale = (halves(blocks[:, :2]) * scale).unsqueeze(2)
    minimum = (halves(blocks[:, 2:4]) * minimum).unsqueeze(2)
    return values.reshape(-1, 8, 32).float().mul_(scale).sub_(minimum)


def _scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [n, 12] -> eight 6-bit scales and eight 6-bit minima, float32 [n, 8] each."""
    low, minima, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = torch.cat([low & 0x3F, (high & 0x0F) | ((low >> 2) & 0x30)], dim=1)
    minimum = torch.cat([minima & 0x3F, (high >> 4) | ((minima >> 2) & 0x30)], dim=1)
    return scale.float(), minimum.float()
