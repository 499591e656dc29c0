"""The IQ formats: indices into tables of sixteen values or into grids of eight or four weights.

Unless stated otherwise, a block of 256 weights starts with a float16 scale; groups have scales too.
"""

import torch
from torch import Tensor

from runtime.quant.formats.bits import (
    double_words,
    fields,
    fields_of_each,
    halves,
    looked_up,
    shifted,
    signed,
    table,
    words,
)
from runtime.quant.formats.grids import grid_rows

NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Seven signs, and an eighth that makes the number of negative ones even.
_EVEN_SIGNS = tuple(index | (index.bit_count() & 1) << 7 for index in range(128))
_SHIFT = 0.125


def iq4_nl(blocks: Tensor) -> Tensor:
    """32 weights: a half, nibbles: low ones are elements 0..15, high ones 16..31."""
    values = looked_up(NONLINEAR, fields(blocks[:, None, 2:], 2, 4))
    return values.view(-1, 32).mul_(halves(blocks[:, :2]))


def iq4_xs(blocks: Tensor) -> Tensor:
    """Eight 6-bit scales as 2 bytes of high pairs and 4 of low nibbles; per 32 as in IQ4_NL."""
    high, low = fields_of_each(blocks[:, 2:4], 4, 2), fields_of_each(blocks[:, 4:8], 2, 4)
    scale = halves(blocks[:, :2]) * (signed(low | (high << 4)) - 32).float()
    values = looked_up(NONLINEAR, fields(blocks[:, 8:].view(-1, 8, 16), 2, 4))
    return values.view(-1, 8, 32).mul_(scale.unsqueeze(2))


def iq2_xxs(blocks: Tensor) -> Tensor:
    """Per 32: four bytes of indices, then four of four sign indices of 7 bits and a scale of 4."""
    groups = blocks[:, 2:].view(-1, 8, 8)
    packed = double_words(groups[..., 4:].flatten(1))
    scale = _scale(blocks, (packed >> 28) & 15, 0.25)
    weights = grid_rows("IQ2_XXS", groups[..., :4])
    return _scaled(weights, scale, _even_signs(shifted(packed, (0, 7, 14, 21), mask=0x7F)))


def iq2_xs(blocks: Tensor) -> Tensor:
    """32 words of an index of 9 bits and a sign index of 7; sixteen scales of 4 bits."""
    packed = words(blocks[:, 2:66])
    scale = _scale(blocks, fields_of_each(blocks[:, 66:], 2, 4), 0.25)
    return _scaled(grid_rows("IQ2_XS", packed & 511), scale, _even_signs(packed >> 9))


def iq2_s(blocks: Tensor) -> Tensor:
    """32 bytes of indices, 32 of signs, 8 of the indices' upper pairs of bits, sixteen scales."""
    index = blocks[:, 2:34].int() | fields_of_each(blocks[:, 66:74], 4, 2).int() << 8
    scale = _scale(blocks, fields_of_each(blocks[:, 74:], 2, 4), 0.25)
    return _scaled(grid_rows("IQ2_S", index), scale, blocks[:, 34:66])


def iq3_xxs(blocks: Tensor) -> Tensor:
    """64 bytes of indices; per 32 weights four sign indices of 7 bits and a scale of 4."""
    packed = double_words(blocks[:, 66:])
    scale = _scale(blocks, (packed >> 28) & 15, 0.5)
    weights = grid_rows("IQ3_XXS", blocks[:, 2:66])
    return _scaled(weights, scale, _even_signs(shifted(packed, (0, 7, 14, 21), mask=0x7F)))


def iq3_s(blocks: Tensor) -> Tensor:
    """64 bytes of indices, 8 of their ninth bits, 32 of signs, eight scales of 4 bits."""
    index = blocks[:, 2:66].int() | fields_of_each(blocks[:, 66:74], 8, 1).int() << 8
    scale = halves(blocks[:, :2]) * (fields_of_each(blocks[:, 106:], 2, 4) * 2 + 1).float()
    return _scaled(grid_rows("IQ3_S", index), scale, blocks[:, 74:106])


def iq1_s(blocks: Tensor) -> Tensor:
    """32 bytes of indices; per 32 weights a word: their upper 3 bits, a scale of 3, a shift's sign.

    Weights are scale * (grid + or - 1/8).
    """
    packed = words(blocks[:, 34:])
    index = blocks[:, 2:34].int() | shifted(packed, (0, 3, 6, 9), mask=7).flatten(1) << 8
    scale = halves(blocks[:, :2]) * (((packed >> 12) & 7) * 2 + 1).float()
    shift = (packed >> 15).float().mul_(-2 * _SHIFT).add_(_SHIFT)
    weights = grid_rows("IQ1_S", index).view(-1, 8, 32)
    return weights.add_(shift.unsqueeze(2)).mul_(scale.unsqueeze(2))


def iq1_m(blocks: Tensor) -> Tensor:
    """32 bytes of indices, 16 of nibbles: 3 upper bits and the shift's sign; four words of scales.

    The words hold four scales of 3 bits each and, in their upper nibbles, the half of the block.
    """
    packed = words(blocks[:, 48:])
    by = table((12, 8, 4, 0), torch.int32, blocks.device)
    half = ((packed & 0xF000) >> by).sum(1, keepdim=True, dtype=torch.int32)
    scale = half.to(torch.int16).view(torch.float16).float()
    scale = scale * (shifted(packed, (0, 3, 6, 9), mask=7).flatten(1) * 2 + 1).float()
    nibbles = fields_of_each(blocks[:, 32:48], 2, 4)
    shift = (nibbles >> 3).float().mul_(-2 * _SHIFT).add_(_SHIFT)
    weights = grid_rows("IQ1_S", blocks[:, :32].int() | (nibbles & 7).int() << 8)
    return weights.add_(shift.unsqueeze(2)).view(-1, 16, 16).mul_(scale.unsqueeze(2))


def _scale(blocks: Tensor, scales: Tensor, factor: float) -> Tensor:
    """Integer [n, groups] -> float32 [n, groups]: the block's half * (1/2 + scale) * factor."""
    return halves(blocks[:, :2]) * (scales.float() + 0.5) * factor


def _even_signs(index: Tensor) -> Tensor:
    """int32 [n, ...] below 128 -> uint8 [n, ...], a sign in each bit."""
    signs = table(_EVEN_SIGNS, torch.uint8, index.device)
    return signs.index_select(0, index.reshape(-1)).view(index.shape)


def _scaled(weights: Tensor, scale: Tensor, signs: Tensor) -> Tensor:
    """256 weights a block in groups with scale [n, groups], and a sign bit for each of them."""
    groups = scale.shape[1]
    weights = weights.view(-1, groups, 256 // groups).mul_(scale.unsqueeze(2))
    factors = signed(fields_of_each(signs.flatten(1), 8, 1)).mul_(-2).add_(1)
    return weights.mul_(factors.view(weights.shape))
