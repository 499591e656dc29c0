"""Rows of blocks, rearranged into planes for devices that load aligned words.

Each field of a block type (quants, high bits, scales, halves) becomes a plane with that field of
all blocks of a row. A row has the same bits in planes as in blocks, then zeros up to a multiple of
16 bytes. Quants are in groups of 32 consecutive weights: where they have four bits or fewer, the
same operation on a word of 32 bits yields four consecutive weights, one in each byte.
"""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

from runtime.quant.block_types import PLANES_ROW_MULTIPLE

# For each bit of a plane, its place in a block of the format.
_Plane = tuple[int, ...]


def to_planes(data: Tensor, type: str, block_bytes: int) -> Tensor:
    """uint8 [rows, n * block_bytes] of the type with this name -> the same rows in planes.

    Needs about thirty times the size of `data` in temporary memory.
    """
    rows, row_bytes = data.shape
    result = data.new_zeros(rows, row_bytes + -row_bytes % PLANES_ROW_MULTIPLE)
    bits = _bits(data.reshape(-1, block_bytes)).flatten(1)
    begin = 0
    for plane in _planes(type):
        moved = bits.index_select(1, torch.tensor(plane, device=data.device))
        size = row_bytes // block_bytes * len(plane) // 8
        result[:, begin : begin + size] = _bytes(moved.view(rows, size, 8))
        begin += size
    return result


def to_blocks(rows: Tensor, type: str, block_bytes: int) -> Tensor:
    """uint8 [rows, padded bytes] in planes -> [rows * n, block_bytes]."""
    blocks = rows.shape[1] // block_bytes
    bits = rows.new_empty(len(rows) * blocks, block_bytes * 8)
    begin = 0
    for plane in _planes(type):
        size = blocks * len(plane) // 8
        part = _bits(rows[:, begin : begin + size]).reshape(len(bits), len(plane))
        bits[:, torch.tensor(plane, device=rows.device)] = part
        begin += size
    return _bytes(bits.view(len(bits), block_bytes, 8))


def _bits(data: Tensor) -> Tensor:
    """uint8 [...] -> [..., 8], the lowest first."""
    return (data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=data.device)) & 1


def _bytes(bits: Tensor) -> Tensor:
    """uint8 [..., 8] -> [...]."""
    by = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits << by).sum(-1, dtype=torch.uint8)


def _field(begin: int, count: int, bits: int, run: int, new_run: int) -> _Plane:
    """`count` numbers of `bits` bits each, from the byte `begin` on.

    A run of `run` bytes has consecutive numbers in the lowest bits of its bytes; the next numbers
    follow in the next bits of the same bytes. In the plane, runs have `new_run` bytes.
    """
    plane = [0] * (count * bits)
    for number in range(count):
        old, new = _place(number, bits, run), _place(number, bits, new_run)
        for bit in range(bits):
            plane[new + bit] = begin * 8 + old + bit
    return tuple(plane)


def _place(number: int, bits: int, run: int) -> int:
    """The first bit of a number."""
    runs, inside = divmod(number, 8 // bits * run)
    return 8 * (runs * run + inside % run) + bits * (inside // run)


def _copied(begin: int, count: int) -> _Plane:
    """Bytes that are copied unchanged."""
    return tuple(range(8 * begin, 8 * (begin + count)))


def _nibbles(begin: int, count: int, run: int) -> _Plane:
    return _field(begin, count, 4, run, 16)


def _neighbours(begin: int, count: int, run: int) -> _Plane:
    """Nibbles in the order of the weights; for types whose nibbles index a table of values."""
    return _field(begin, count, 4, run, 1)


def _pairs(begin: int) -> _Plane:
    return _field(begin, 256, 2, 32, 4)


def _k_scales() -> tuple[_Plane, _Plane]:
    """Scales of Q4_K and Q5_K: one byte per group has the lower four bits of its scale and of its
    minimum; another byte has the upper two bits of both for two groups."""
    low: list[int] = []
    high: list[int] = []
    for group in range(8):
        near, far = 8 * (4 + group % 4), 8 * (12 + group % 4)
        if group < 4:
            low += [*range(near, near + 4), *range(near + 32, near + 36)]
            high += [near + 4, near + 5, near + 36, near + 37]
        else:
            low += range(far, far + 8)
            high += [near + 6, near + 7, near + 38, near + 39]
    return tuple(low), tuple(high)


@cache
def _planes(type: str) -> tuple[_Plane, ...]:
    planes = PLANES[type]
    assert sorted(bit for plane in planes for bit in plane) == list(range(sum(map(len, planes))))
    return planes


# Planes with the widest loads come first, so that all planes are aligned.
PLANES: Mapping[str, tuple[_Plane, ...]] = MappingProxyType(
    {
        "Q4_0": (_nibbles(2, 32, 16), _copied(0, 2)),
        "Q4_1": (_nibbles(4, 32, 16), _copied(0, 4)),
        "Q5_0": (_nibbles(6, 32, 16), _field(2, 32, 1, 1, 4), _copied(0, 2)),
        "Q5_1": (_nibbles(8, 32, 16), _field(4, 32, 1, 1, 4), _copied(0, 4)),
        "Q8_0": (_copied(2, 32), _copied(0, 2)),
        "Q2_K": (_pairs(16), _copied(0, 16), _copied(80, 4)),
        "Q3_K": (
            _pairs(32), _field(0, 256, 1, 32, 4), _field(96, 16, 4, 8, 1),
            _field(104, 16, 2, 4, 1), _copied(108, 2),
        ),
        "Q4_K": (_nibbles(16, 256, 32), *_k_scales(), _copied(0, 4)),
        "Q5_K": (
            _nibbles(48, 256, 32), _field(16, 256, 1, 32, 4), *_k_scales(), _copied(0, 4),
        ),
        "Q6_K": (_nibbles(0, 256, 64), _pairs(128), _copied(192, 16), _copied(208, 2)),
        "IQ4_NL": (_neighbours(2, 32, 16), _copied(0, 2)),
        "IQ4_XS": (_neighbours(8, 256, 16), _copied(4, 4), _copied(2, 2), _copied(0, 2)),
        "MXFP4": (_neighbours(1, 32, 16), _copied(0, 1)),
        "MXFP4_PAIRS": (_copied(1, 16), _copied(0, 1)),
        "NVFP4": (_neighbours(4, 64, 8), _copied(0, 4)),
        "TQ1_0": (_copied(0, 52), _copied(52, 2)),
        "TQ2_0": (_pairs(0), _copied(64, 2)),
        "IQ2_XXS": (_copied(2, 64), _copied(0, 2)),
        "IQ2_XS": (_copied(2, 64), _copied(66, 8), _copied(0, 2)),
        "IQ2_S": (
            _copied(2, 32), _copied(34, 32), _copied(66, 8), _copied(74, 8), _copied(0, 2),
        ),
        "IQ3_XXS": (_copied(2, 64), _copied(66, 32), _copied(0, 2)),
        "IQ3_S": (
            _copied(2, 64), _copied(74, 32), _copied(66, 8), _copied(106, 4), _copied(0, 2),
        ),
        "IQ1_S": (_copied(2, 32), _copied(34, 16), _copied(0, 2)),
        "IQ1_M": (_copied(0, 32), _copied(32, 16), _copied(48, 8)),
    }
)  # fmt: skip
