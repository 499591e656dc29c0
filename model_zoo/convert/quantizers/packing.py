"""Packs bit fields, half-precision numbers and signed bytes into the bytes of a block."""

import torch
from torch import Tensor


def packed(values: Tensor, bits: int) -> Tensor:
    """uint8 [n, groups, count, width] -> [n, groups, width]: `count` fields, the lowest first."""
    count = values.shape[2]
    out = values[:, :, 0]
    for index in range(1, count):
        out = out | (values[:, :, index] << (bits * index))
    return out


def nibbles(values: Tensor) -> Tensor:
    """uint8 [n, 32] -> [n, 16]: elements 0 to 15 are the low nibbles, 16 to 31 the high ones."""
    return packed(values.reshape(-1, 1, 2, 16), 4).squeeze(1)


def halves(numbers: Tensor) -> Tensor:
    """float32 [n, 1] -> uint8 [n, 2]."""
    return numbers.to(torch.float16).contiguous().view(torch.uint8)


def signed_bytes(numbers: Tensor) -> Tensor:
    """float32 [n, k], whole numbers from -128 to 127 -> uint8 [n, k] of the same bits."""
    return numbers.to(torch.int8).contiguous().view(torch.uint8)
