"""Q16_0: 32 integers of 16 bits that share a power of two, made of float16 and bfloat16.

It exists in tiles for CPUs only (`row_tiles.py`), not in files. The largest integer of a block has
13 bits and a sign, so that sums of products with activations of as many bits fit into 32 bits. A
float16 has 11 bits: those from a quarter of the largest one of their block on are kept as they are,
others to 2^-13 of the largest; a bfloat16 has 8.

A block: a byte e, then 32 integers; a number is integer * 2^(e - 128).
"""

import torch
from torch import Tensor

from runtime.quant.formats.microscaling import power_of_two

BLOCK_ELEMENTS = 32
BLOCK_BYTES = 1 + 2 * BLOCK_ELEMENTS
LARGEST = 8191
_EXPONENT_BIAS = 128
_LARGEST_EXPONENT = 255


def to_q16_0(numbers: Tensor) -> Tensor:
    """float16 or bfloat16 [..., n * 32] -> uint8 [..., n * 65].

    A block with an infinity or NaN becomes infinite, or as large as blocks can be.
    """
    blocks = numbers.float().nan_to_num(torch.inf).unflatten(-1, (-1, BLOCK_ELEMENTS))
    top = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.frexp(top).exponent - LARGEST.bit_length() + _EXPONENT_BIAS
    exponent = torch.where(top.isinf(), _LARGEST_EXPONENT, exponent).clamp_(0, _LARGEST_EXPONENT)
    scaled = torch.ldexp(blocks, _EXPONENT_BIAS - exponent)
    integers = scaled.round_().clamp_(-LARGEST, LARGEST).to(torch.int16)
    stored = torch.cat([exponent.to(torch.uint8), integers.view(torch.uint8)], dim=-1)
    return stored.flatten(-2)


def q16_0(blocks: Tensor) -> Tensor:
    """uint8 [n, 65] -> float32 [n, 32]."""
    integers = blocks[:, 1:].clone(memory_format=torch.contiguous_format).view(torch.int16)
    return integers.float().mul_(power_of_two(blocks[:, :1]))
