"""Decoding of block bytes: float16, signed bytes, bit fields, table lookups."""

from functools import cache

import torch
from torch import Tensor


def halves(two_bytes: Tensor) -> Tensor:
    """uint8 [n, 2] -> float32 [n, 1]; copied, since a view needs an even storage offset."""
    return _copied(two_bytes).view(torch.float16).float()


def signed(values: Tensor) -> Tensor:
    """uint8 [..., n] -> int8 of the same bits."""
    return _copied(values).view(torch.int8)


def words(pairs: Tensor) -> Tensor:
    """uint8 [n, 2 k], little-endian -> int32 [n, k], 0 to 65535."""
    return _copied(pairs).view(torch.int16).int() & 0xFFFF


def double_words(fours: Tensor) -> Tensor:
    """uint8 [n, 4 k], little-endian -> int32 [n, k] of the same bits."""
    return _copied(fours).view(torch.int32)


def fields(values: Tensor, count: int, bits: int) -> Tensor:
    """uint8 [n, groups, width] -> [n, groups, count, width]: `count` fields, the lowest first."""
    by = torch.arange(0, count * bits, bits, dtype=torch.uint8, device=values.device)
    return (values.unsqueeze(2) >> by.view(1, 1, -1, 1)).bitwise_and_((1 << bits) - 1)


def fields_of_each(values: Tensor, count: int, bits: int) -> Tensor:
    """uint8 [n, k] -> [n, k * count]: the fields of a byte side by side, the lowest first."""
    return fields(values.unsqueeze(2), count, bits).flatten(1)


def shifted(values: Tensor, bits: tuple[int, ...], *, mask: int) -> Tensor:
    """int32 [n, k] -> [n, k, len(bits)]: shifted right by each of `bits` and masked."""
    by = table(bits, torch.int32, values.device)
    return (values.unsqueeze(2) >> by).bitwise_and_(mask)


@cache
def table(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of constants, created once for each device."""
    return torch.tensor(values, dtype=dtype, device=device)


def looked_up(values: tuple[float, ...], index: Tensor) -> Tensor:
    """Integer [...] -> float32 [...]: values[index]."""
    constants = table(values, torch.float32, index.device)
    return constants.index_select(0, index.reshape(-1).int()).view(index.shape)


def _copied(values: Tensor) -> Tensor:
    return values.clone(memory_format=torch.contiguous_format)
