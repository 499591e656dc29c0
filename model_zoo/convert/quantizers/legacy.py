"""The first block types, whose scales follow from the range of a block.

Bit-identical to `gguf.quants.quantize`.
"""

import torch
from torch import Tensor

from model_zoo.convert.quantizers.fitting import inverse
from model_zoo.convert.quantizers.packing import halves, nibbles, packed, signed_bytes


def q4_0(blocks: Tensor) -> Tensor:
    """float32 [n, 32] -> uint8 [n, 18]."""
    scale, values = _symmetric(blocks, 8)
    return torch.cat([halves(scale), nibbles(values)], dim=1)


def q4_1(blocks: Tensor) -> Tensor:
    """float32 [n, 32] -> uint8 [n, 20]."""
    scale, minimum, values = _affine(blocks, 15)
    return torch.cat([halves(scale), halves(minimum), nibbles(values)], dim=1)


def q5_0(blocks: Tensor) -> Tensor:
    """float32 [n, 32] -> uint8 [n, 22]."""
    scale, values = _symmetric(blocks, 16)
    return torch.cat([halves(scale), _fifth_bits(values), nibbles(values & 15)], dim=1)


def q5_1(blocks: Tensor) -> Tensor:
    """float32 [n, 32] -> uint8 [n, 24]."""
    scale, minimum, values = _affine(blocks, 31)
    parts = [halves(scale), halves(minimum), _fifth_bits(values), nibbles(values & 15)]
    return torch.cat(parts, dim=1)


def q8_0(blocks: Tensor) -> Tensor:
    """float32 [n, 32] -> uint8 [n, 34]; halves are rounded away from 0."""
    scale = blocks.abs().amax(dim=1, keepdim=True) / 127
    values = blocks * inverse(scale)
    whole = values.trunc()
    values = whole + (values - whole).mul_(2).trunc_()
    return torch.cat([halves(scale), signed_bytes(values)], dim=1)


def _symmetric(blocks: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """The weight furthest from 0 becomes `-levels`; values are stored with `levels` added."""
    furthest = blocks.abs().argmax(dim=1, keepdim=True)
    scale = blocks.gather(1, furthest) / -levels
    values = (blocks * inverse(scale)).add_(levels + 0.5).clamp_(max=2 * levels - 1)
    return scale, values.to(torch.uint8)


def _affine(blocks: Tensor, highest: int) -> tuple[Tensor, Tensor, Tensor]:
    minimum = blocks.amin(dim=1, keepdim=True)
    scale = (blocks.amax(dim=1, keepdim=True) - minimum) / highest
    values = (blocks - minimum).mul_(inverse(scale)).add_(0.5).clamp_(max=highest)
    return scale, minimum, values.to(torch.uint8)


def _fifth_bits(values: Tensor) -> Tensor:
    """uint8 [n, 32] -> [n, 4]: eight elements share a byte, the first in its lowest bit."""
    return packed((values >> 4).view(len(values), -1, 8, 1), 1).squeeze(2)
