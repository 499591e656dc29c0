"""Quantised weights, their layouts on devices, and their values in float32."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

from runtime.quant.block_types import (
    BLOCK_TYPES,
    MXFP4_PAIRS,
    Q16_0,
    TILE_ROWS,
    BlockType,
    WeightLayout,
)
from runtime.quant.formats import (
    codebooks,
    k_quants,
    legacy,
    microscaling,
    planes,
    row_tiles,
    sixteen_bits,
    ternary,
)

# The types of rows in planes, by the name of the block type; their ids do not occur in GGUF.
PLANAR_TYPES: Mapping[str, BlockType] = MappingProxyType(
    {
        t.name: replace(
            t, id=1000 + t.id, name=f"{t.name} in planes", layout=WeightLayout.PLANES, blocks=t
        )
        for t in (*BLOCK_TYPES.values(), MXFP4_PAIRS)
        if t.name in planes.PLANES
    }
)
# The types of rows in tiles, likewise, by their ids.
TILED_TYPES: Mapping[int, BlockType] = MappingProxyType(
    {
        2000 + t.id: replace(
            t, id=2000 + t.id, name=f"{t.name} in tiles", layout=WeightLayout.TILES, blocks=t
        )
        for t in (*BLOCK_TYPES.values(), MXFP4_PAIRS, Q16_0)
        if t.name in row_tiles.TILED
    }
)


class Compute(IntEnum):
    """How activations enter products with quantised weights.

    EXACT: in float32. FINE and FAST: each group of 32 activations of a row as integers of 15 or 8
    bits with one scale, so that products are sums of integers; of 14 bits with weights in Q16_0.
    BF16 on a CPU: FAST rounds activations to bfloat16; FINE, with AMX, to the sum of two. Other
    types without such kernels are always EXACT. AUTO: FAST for BF16 on a CPU that multiplies
    bfloat16 without AMX, else FINE; `kernels/auto_compute.py` chooses one of them for whole files.
    On CUDA devices this applies to up to eight rows; more rows, and EXACT, are multiplied in the
    rows' own type, to which weights are rounded.
    """

    EXACT = 0
    FINE = 1
    FAST = 2
    AUTO = 3


# Number of bytes that are rearranged into planes at once.
_SLAB_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Weight:
    """A quantised tensor, in the bytes of its file or rearranged.

    data: uint8 [..., rows, row bytes], in tiles [..., rows / 16, 16 * row bytes], possibly a
    read-only memory map; shape: the logical one, in torch order (..., out, in). deterministic: on
    CUDA devices, one kernel with one tile size multiplies any number of rows, regardless of
    `compute`, so that the bits of a row do not depend on other rows. On a CPU they never do.
    """

    data: Tensor
    type: BlockType
    shape: tuple[int, ...]
    compute: Compute = Compute.EXACT
    deterministic: bool = False

    def __post_init__(self) -> None:
        expected = self.type.data_shape(self.shape)
        assert self.data.dtype == torch.uint8, self.data.dtype
        assert tuple(self.data.shape) == expected, (tuple(self.data.shape), expected)

    @property
    def nbytes(self) -> int:
        return prod(self.data.shape)

    @property
    def number_type(self) -> torch.dtype | None:
        """The type of plain numbers; None if the weights are in blocks."""
        return _PLAIN.get(self.type.name)

    @property
    def by_triton(self) -> bool:
        """Whether Triton kernels read it on CUDA devices; the twins compute with other blocks."""
        in_planes = self.type.layout is WeightLayout.PLANES
        return in_planes or self.number_type is not None or self.deterministic

    @property
    def rounding(self) -> Compute | None:
        """How CUDA devices round a few rows that they multiply with it; None if they do not."""
        exact = self.compute is Compute.EXACT or self.deterministic
        return None if exact or self.type.layout is not WeightLayout.PLANES else self.compute

    def to(self, device: torch.device | str) -> "Weight":
        return replace(self, data=self.data.to(device))

    def unflatten(self, count: int) -> "Weight":
        """(count * out, in) as (count, out, in), a view; in tiles, `out` is a multiple of 16."""
        outs, rest = divmod(self.shape[0], count)
        assert rest == 0, (self.shape, count)
        shape = count, outs, self.shape[-1]
        data = self.data.unflatten(0, self.type.data_shape(shape)[:2])
        return replace(self, data=data, shape=shape)

    def matrices(self, begin: int, end: int) -> "Weight":
        """(n, out, in) -> matrices [begin, end), as a view."""
        data = self.data[begin:end]
        return replace(self, data=data, shape=(len(data), *self.shape[1:]))

    def outputs(self, begin: int, end: int, step: int = 1) -> "Weight":
        """Every `step`-th of the rows [begin, end) of each matrix, as a view; in tiles every row,
        from and to a multiple of 16."""
        at = slice(begin, end, step)
        if self.type.layout is WeightLayout.TILES:
            assert begin % TILE_ROWS == end % TILE_ROWS == 0 and step == 1, (begin, end, step)
            at = slice(begin // TILE_ROWS, end // TILE_ROWS)
        rows = range(self.shape[-2])[begin:end:step]
        shape = *self.shape[:-2], len(rows), self.shape[-1]
        return replace(self, data=self.data[..., at, :], shape=shape)

    def inputs(self, begin: int, end: int) -> "Weight":
        """Columns [begin, end) of each matrix, as a view; both are multiples of a block.

        Not available in planes.
        """
        assert self.type.layout is not WeightLayout.PLANES, self.type.name
        by = self.type.interleaved_rows
        at = slice(by * self.type.row_bytes(begin), by * self.type.row_bytes(end))
        shape = *self.shape[:-1], end - begin
        return replace(self, data=self.data[..., at], shape=shape)

    def in_tiles(self, type: BlockType) -> "Weight":
        """A copy in tiles of this type; the rows of a matrix are a multiple of 16. Of F16 and BF16
        in Q16_0, with rounded numbers."""
        data = to_tiles(self.data.flatten(0, -2), self.type, type)
        return replace(self, data=data.view(type.data_shape(self.shape)), type=type)

    def in_planes(self, device: torch.device) -> "Weight":
        """This weight on the device, rearranged into planes if its type has them."""
        type = PLANAR_TYPES.get(self.type.name)
        if type is None:
            return self.to(device)
        shape = *self.shape[:-1], type.row_bytes(self.shape[-1])
        data = torch.empty(shape, dtype=torch.uint8, device=device)
        at_once = max(1, _SLAB_BYTES // max(1, self.data.shape[-1]))
        for source, placed in zip(
            self.data if self.data.dim() == 3 else [self.data],
            data if data.dim() == 3 else [data],
            strict=True,
        ):
            for some, rows in zip(source.split(at_once), placed.split(at_once), strict=True):
                moved = planes.to_planes(some.to(device), self.type.name, self.type.block_bytes)
                rows.copy_(moved)
        return replace(self, data=data, type=type)

    def numbers(self) -> Tensor | None:
        """[..., out, in] in the stored type; None if the weights are in blocks."""
        dtype = self.number_type
        return None if dtype is None else _numbers(self.data.contiguous(), dtype)

    def dequantize(self) -> Tensor:
        """float32, of the logical shape; may share memory with `data` where the type is F32."""
        return dequantize(self.data, self.type)


def dequantize(data: Tensor, type: BlockType) -> Tensor:
    """uint8 [..., n * block_bytes] -> float32 [..., n * block_elements].

    In planes, of whole rows; in tiles, uint8 [..., tiles, 16 * n * block_bytes] -> float32
    [..., 16 * tiles, n * block_elements]. Bit for bit equal to `gguf.quants.dequantize`; integers
    and F64, which it does not support, are rounded to float32. The result for F32 is a view of
    `data`.
    """
    if type.name in _PLAIN:
        return _numbers(data.contiguous(), _PLAIN[type.name]).float()
    if type.layout is WeightLayout.TILES:
        assert type.blocks is not None
        rows = row_tiles.to_rows(data.flatten(0, -2), type.blocks.name, type.block_bytes)
        return dequantize(rows.view(*data.shape[:-2], -1, rows.shape[-1]), type.blocks)
    elements = data.shape[-1] // type.block_bytes * type.block_elements
    if type.blocks is None:
        blocks = data.reshape(-1, type.block_bytes)
    else:
        type = type.blocks
        blocks = planes.to_blocks(data.flatten(0, -2), type.name, type.block_bytes)
    return _DEQUANTIZERS[type.name](blocks).reshape(*data.shape[:-1], elements)


def to_tiles(rows: Tensor, of: BlockType, to: BlockType) -> Tensor:
    """uint8 [16 n, row bytes] of one type -> [n, 16 * row bytes] of its type in tiles."""
    assert to.blocks is not None
    if of != to.blocks:
        rows = sixteen_bits.to_q16_0(_numbers(rows.contiguous(), _PLAIN[of.name]))
    return row_tiles.to_tiles(rows, to.blocks.name, to.blocks.block_bytes)


def gather_rows(weight: Weight, ids: Tensor) -> Tensor:
    """weight (rows, in), ids [n] integer -> float32 [n, in]; reads no other rows. Not
    available in tiles."""
    assert weight.type.layout is not WeightLayout.TILES, weight.type.name
    return dequantize(weight.data.index_select(0, ids), weight.type)


def _numbers(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers; copied if their offset is not aligned, which torch cannot view."""
    return (data.clone() if data.storage_offset() % dtype.itemsize else data).view(dtype)


_PLAIN: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
_DEQUANTIZERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": legacy.q4_0,
    "Q4_1": legacy.q4_1,
    "Q5_0": legacy.q5_0,
    "Q5_1": legacy.q5_1,
    "Q8_0": legacy.q8_0,
    "Q2_K": k_quants.q2_k,
    "Q3_K": k_quants.q3_k,
    "Q4_K": k_quants.q4_k,
    "Q5_K": k_quants.q5_k,
    "Q6_K": k_quants.q6_k,
    "IQ1_S": codebooks.iq1_s,
    "IQ1_M": codebooks.iq1_m,
    "IQ2_XXS": codebooks.iq2_xxs,
    "IQ2_XS": codebooks.iq2_xs,
    "IQ2_S": codebooks.iq2_s,
    "IQ3_XXS": codebooks.iq3_xxs,
    "IQ3_S": codebooks.iq3_s,
    "IQ4_NL": codebooks.iq4_nl,
    "IQ4_XS": codebooks.iq4_xs,
    "TQ1_0": ternary.tq1_0,
    "TQ2_0": ternary.tq2_0,
    "MXFP4": microscaling.mxfp4,
    "MXFP4_PAIRS": microscaling.mxfp4_pairs,
    "NVFP4": microscaling.nvfp4,
    "Q16_0": sixteen_bits.q16_0,
}
