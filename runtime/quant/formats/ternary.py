"""Ternary formats: blocks of 256 weights that are -1, 0 or 1 times one scale."""

import torch
from torch import Tensor

from runtime.quant.formats.bits import fields, halves, signed, table


def tq1_0(blocks: Tensor) -> Tensor:
    """52 bytes of five or four base-3 digits each, scaled to fractions of 256; a half.

    The digits of 32 bytes are elements 0..159, those of 16 more 160..239, of the last four 240 on.
    """
    parts = (blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)
    digits = torch.cat([_digits(part, count) for part, count in parts], dim=1)
    return digits.float().mul_(halves(blocks[:, 52:]))


def tq2_0(blocks: Tensor) -> Tensor:
    """64 bytes of bit pairs, a half."""
    values = fields(blocks[:, :64].view(-1, 2, 32), 4, 2).reshape(-1, 256)
    return (signed(values) - 1).float().mul_(halves(blocks[:, 64:]))


def _digits(packed: Tensor, count: int) -> Tensor:
    """uint8 [n, k] -> int8 [n, count * k] in -1, 0, 1; products wrap around by design.

    A digit is the whole part of 3 times the fraction.
    """
    powers = table((1, 3, 9, 27, 81)[:count], torch.uint8, packed.device)
    fractions = packed.unsqueeze(1) * powers.view(1, -1, 1)
    return ((fractions.to(torch.int16) * 3) >> 8).to(torch.int8).sub_(1).flatten(1)
