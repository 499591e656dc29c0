"""Products of tiles of rows with weights in planes, which are dequantised in registers.

Weights become numbers of the rows' type, as in the twins, and are multiplied by tensor cores;
numbers of 32 bits as sums of shorter ones. Where a weight has few outputs, programs divide its
inputs, and another launch adds what they computed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.triton.dequantize import group_values
from runtime.kernels.triton.groups import grid_of
from runtime.kernels.triton.launch import launch
from runtime.kernels.triton.words import multiplied
from runtime.quant.block_types import Weight

OUTS = 64  # of a program
_PROGRAMS = 528  # four for each multiprocessor of an H100
_SUMMED = 512


# The numbers of rows that a program may have, the groups of 32 inputs that it then reads at once,
# and its warps: what fits into the registers of a thread.
_TILES = {16: (4, 4), 32: (4, 4), 64: (4, 8)}
_TILES_OF_FLOATS = {16: (2, 4), 32: (2, 4)}
_LEAST_GROUPS = 16  # of a program


def tiles_of(dtype: torch.dtype) -> Mapping[int, tuple[int, int]]:
    """Rows of a program, the fewest first, to the groups that it reads at once and its warps."""
    return _TILES_OF_FLOATS if dtype == torch.float32 else _TILES


def tile_of(dtype: torch.dtype, rows: int) -> int:
    """The smallest tile with so many rows, else the largest."""
    sizes = tiles_of(dtype)
    return next((size for size in sizes if size >= rows), max(sizes))


@dataclass(frozen=True, slots=True, eq=False)
class Bundles:
    """Pairs of a row and an expert, by expert: experts int32 [n], pairs int32 [n, size].

    Unused places have the number of pairs; a bundle's used ones come first.
    """

    experts: Tensor
    pairs: Tensor


def tile_product(x: Tensor, weight: Weight) -> Tensor:
    """x [rows, in], weight (out, in) in planes -> [rows, out] in x's type."""
    rows, outs = len(x), weight.shape[0]
    result = torch.empty(rows, outs, dtype=x.dtype, device=x.device)
    tile, splits = tile_of(x.dtype, rows), _splits(weight)
    tiles = triton.cdiv(rows, tile)
    if splits == 1:
        _launch(x, weight, result, tiles, tile, 1)
        return result
    parts = torch.empty(splits, rows, outs, dtype=torch.float32, device=x.device)
    _launch(x, weight, parts, tiles, tile, splits)
    count = rows * outs
    launch(
        sum_kernel, (triton.cdiv(count, _SUMMED),), parts, result, count, SPLITS=splits,
        SIZE=_SUMMED, num_warps=4, device=x.device,
    )  # fmt: skip
    return result


def expert_tiles(
    x: Tensor,
    weight: Weight,
    bundles: Bundles,
    shape: torch.Size,
    bias: Tensor | None,
    scale: Tensor | None,
) -> Tensor:
    """As `expert_products`; `shape`: [tokens, used] of the pairs in the bundles."""
    rows, share = x.flatten(0, -2), shape[1] if x.dim() == 2 else 1
    result = torch.empty(shape.numel(), weight.shape[1], dtype=x.dtype, device=x.device)
    count, tile = bundles.pairs.shape
    factors = None if scale is None else scale.float().flatten()
    _launch(rows, weight, result, count, tile, 1, bundles, share, factors, bias)
    return result.view(*shape, weight.shape[1])


def _splits(weight: Weight) -> int:
    """Depends on the shape only."""
    outs, groups = triton.cdiv(weight.shape[0], OUTS), weight.shape[1] // 32
    wanted = min(_PROGRAMS // max(1, outs), groups // _LEAST_GROUPS)
    return 1 << max(0, wanted.bit_length() - 1)


def _launch(
    x: Tensor,
    weight: Weight,
    result: Tensor,
    tiles: int,
    tile: int,
    splits: int,
    bundles: Bundles | None = None,
    share: int = 1,
    factors: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    assert weight.type.blocks is not None and x.stride(1) == 1
    (outs, elements), data, type = weight.shape[-2:], weight.data, weight.type.blocks.name
    places = (None, None) if bundles is None else (bundles.experts, bundles.pairs)
    rows = len(x) if bundles is None else len(result)
    groups, warps = tiles_of(x.dtype)[tile]
    launch(
        tile_kernel, (triton.cdiv(outs, OUTS), tiles, splits), x, data, grid_of(type, data.device),
        *places, factors, bias, result, rows, outs, elements // 32, x.stride(0), data.stride(-2),
        data.stride(0), share, TYPE=type, ROWS=tile, OUTS=OUTS,
        GROUPS=groups, SPLITS=splits, num_warps=warps, device=data.device,
    )  # fmt: skip


@triton.jit
def tile_kernel(
    x, data, grid, experts, pairs, factors, bias, result, rows, outs, groups, x_stride, row_stride,
    expert_stride, share, TYPE: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr,
    GROUPS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Rows are those of x or, with `pairs`, pairs of a row and an expert; `rows` counts either."""
    tile, split = tl.program_id(1), tl.program_id(2)
    row = tile * ROWS + tl.arange(0, ROWS)
    if pairs is not None:
        if tl.load(pairs + tile * ROWS) == rows:
            return
        expert = tl.load(experts + tile).to(tl.int64)
        data += expert * expert_stride
        row = tl.load(pairs + row)
    source = x + (tl.minimum(row, rows - 1) // share).to(tl.int64) * x_stride
    out = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    # One group of 32 weights after the other, GROUPS of each row.
    index = tl.arange(0, OUTS * GROUPS)
    weight_row = tl.minimum(tl.program_id(0) * OUTS + index // GROUPS, outs - 1)
    weights = data + weight_row.to(tl.int64) * row_stride
    within = tl.arange(0, GROUPS * 32)
    total = tl.zeros([OUTS, ROWS], tl.float32)
    steps = tl.cdiv(tl.cdiv(groups, GROUPS), SPLITS) * GROUPS
    for begin in range(split * steps, tl.minimum((split + 1) * steps, groups), GROUPS):
        g = tl.minimum(begin + index % GROUPS, groups - 1)
        values = group_values(weights, g, groups, grid, TYPE).to(x.dtype.element_ty)
        column = begin * 32 + within
        exists = (row < rows)[:, None] & (column < groups * 32)[None, :]
        some = tl.load(source[:, None] + column[None, :], mask=exists, other=0.0)
        values = tl.reshape(values, [OUTS, GROUPS * 32])
        total = multiplied(values, tl.trans(some), total)
    if factors is not None:
        total *= tl.load(factors + row, mask=row < rows, other=0.0)[None, :]
    if bias is not None:
        total += tl.load(bias + expert * outs + out, mask=out < outs, other=0.0)[:, None]
    place = (split * rows + row).to(tl.int64)[None, :] * outs + out[:, None]
    exists = (row < rows)[None, :] & (out < outs)[:, None]
    tl.store(result + place, total.to(result.dtype.element_ty), mask=exists)


@triton.jit
def sum_kernel(parts, result, count, SPLITS: tl.constexpr, SIZE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.float32)
    for split in tl.static_range(SPLITS):
        at = parts + tl.cast(count, tl.int64) * split + place
        total += tl.load(at, mask=place < count, other=0.0)
    tl.store(result + place, total.to(result.dtype.element_ty), mask=place < count)
