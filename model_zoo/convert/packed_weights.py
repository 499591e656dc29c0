"""Unpacks integers and floats of few bits that are stored several in one number."""

import torch
from torch import Tensor

from runtime.quant.formats.microscaling import E2M1

WORD_BITS = 32
# The order in which a word of AWQ holds the 4 bits of eight columns.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def integers(words: Tensor, bits: int) -> Tensor:
    """int32 [rows, words] -> int32 [rows, words * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts).bitwise_and_((1 << bits) - 1).flatten(-2)


def awq_integers(words: Tensor) -> Tensor:
    """int32 [rows, words] -> int32 [rows, words * 8], in AWQ's order."""
    columns = integers(words, 4).unflatten(-1, (-1, len(_AWQ_COLUMNS)))
    order = torch.tensor(_AWQ_COLUMNS).argsort()
    return columns[..., order].flatten(-2)


def from_zero_points(
    integers: Tensor, zero: Tensor, scale: Tensor, groups: Tensor | None
) -> Tensor:
    """integers [out, in] -> float32 [out, in], (integers - zero) * scale.

    zero, scale: [out, groups]. groups: the group of each column, [in]; None: each group is a run
    of adjacent columns. Raises IndexError for groups that do not exist.
    """
    if groups is None:
        groups = torch.arange(integers.shape[1]) // -(-integers.shape[1] // scale.shape[1])
    groups = groups.long()
    if (groups < 0).any():
        raise IndexError("negative groups")
    return (integers - zero[:, groups]).float() * scale.float()[:, groups]


def four_bit_floats(packed: Tensor) -> Tensor:
    """uint8 [out, in / 2] of E2M1, the first in the low bits -> float32 [out, in]."""
    values = torch.tensor(E2M1, dtype=torch.float32) / 2
    return values[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).int()]
