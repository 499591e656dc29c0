"""Products of 65 to 256 rows of 16 bits on Hopper, whose tensor cores read shared memory.

The weights of a product come from registers, its activations from shared memory, where Triton
copies them ahead. As in `fragments`, four threads have the elements of a weight's row that a tensor
core multiplies at once, and each has a group of 32 of its own. Rows of activations are copied into
the same order of inner elements before, once for all weights.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.triton.curves import gated
from runtime.kernels.triton.dequantize import numbers
from runtime.kernels.triton.groups import grid_of, packed, unpacked
from runtime.kernels.triton.launch import BLACKWELL, HOPPER, capability, divided, launch
from runtime.kernels.triton.overlap import begin_next, wait_for_previous
from runtime.kernels.triton.pointwise import gate
from runtime.kernels.triton.tiles import Tiling, add_parts, splits_of
from runtime.kernels.triton.words import finished, multiplied, stacked
from runtime.quant.weight import Weight

# What fits into the registers of a thread and into shared memory.
TILINGS = (Tiling(128, 128, 4, 8, programs=132), Tiling(256, 128, 4, 8, programs=132))
MOST_ROWS = TILINGS[-1].rows
_ARRANGED = 1024  # elements of a row that a program arranges


def has_wide_tiles(device: torch.device) -> bool:
    """Whether the device has the instructions: of Hopper only, not of later devices."""
    return HOPPER <= capability(device) < BLACKWELL


def wide_products(
    x: Tensor, weights: Sequence[Weight], operands: torch.dtype
) -> tuple[Tensor, ...]:
    """x [rows, in], one to MOST_ROWS, rounded to `operands` of 16 bits, weights (out, in) in planes
    -> [rows, out] each, in x's type."""
    rows = arranged(x, operands)
    return tuple(_product(rows, weight, x.dtype) for weight in weights)


def gated_wide_tiles(x: Tensor, weight: Weight, curve: int) -> Tensor:
    """x [rows, in] of 16 bits, one to MOST_ROWS, weight (2 n, in) in planes, rows of gates first ->
    [rows, n]: the curve of the gates times the others, both rounded to x's type before."""
    rows = arranged(x, x.dtype)
    if splits_of(weight, tiling_of(len(x))) > 1:
        return gate(curve, *_product(rows, weight, x.dtype).chunk(2, dim=1))
    result = torch.empty(len(x), weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    _launch(rows, weight, result, curve=curve)
    return result


def tiling_of(rows: int) -> Tiling:
    """The smallest tiling with at least so many rows."""
    return next(tiling for tiling in TILINGS if tiling.rows >= rows)


def arranged(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [rows, in], whose elements are adjacent -> [rows, blocks * 128] in `dtype`, filled up
    with 0.

    The order of a block: two elements of each of its four groups, then the next two.
    """
    assert x.stride(1) == 1, x.stride()
    rows, elements = x.shape
    length = divided(elements, 128) * 128
    result = torch.empty(rows, length, dtype=dtype, device=x.device)
    launch(
        arrange_rows_kernel, (rows, divided(length, _ARRANGED)), x, result, elements, length,
        x.stride(0), SIZE=_ARRANGED, num_warps=4, device=x.device, overlaps=True,
    )  # fmt: skip
    return result


def _product(x: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
    """x: as `arranged`."""
    rows, outs = len(x), weight.shape[0]
    result = torch.empty(rows, outs, dtype=dtype, device=x.device)
    splits = splits_of(weight, tiling_of(rows))
    if splits == 1:
        _launch(x, weight, result)
        return result
    parts = torch.empty(splits, rows, outs, dtype=torch.float32, device=x.device)
    _launch(x, weight, parts, splits=splits)
    add_parts(parts, result)
    return result


def _launch(
    x: Tensor, weight: Weight, result: Tensor, *, splits: int = 1, curve: int | None = None
) -> None:
    """result [rows, outs], or [splits, rows, outs]."""
    assert weight.type.blocks is not None
    type, data = weight.type.blocks.name, weight.data
    rows, outs = result.shape[-2:]
    tiling = tiling_of(rows)
    held = tiling.outs if curve is None else tiling.outs // 2
    launch(
        wide_tile_kernel, (divided(rows, tiling.rows), divided(outs, held), splits), x, data,
        grid_of(type, data.device), result, rows, outs, weight.shape[1] // 32, x.stride(0),
        data.stride(0), splits, TYPE=type, ROWS=tiling.rows, OUTS=tiling.outs, CURVE=curve,
        num_warps=tiling.warps, num_stages=tiling.stages, device=data.device, overlaps=True,
    )  # fmt: skip


@triton.jit
def arrange_rows_kernel(x, result, elements, length, row_stride, SIZE: tl.constexpr):
    """A program arranges SIZE elements of a row."""
    begin_next()
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1) * (SIZE // 2) + tl.arange(0, SIZE // 2)
    source = pair // 64 * 128 + pair % 4 * 32 + pair // 4 % 16 * 2
    within = tl.arange(0, 2)[None, :]
    two = tl.load(
        x + row * row_stride + source[:, None] + within,
        mask=(source < elements)[:, None],
        other=0.0,
    )
    place = pair[:, None] * 2 + within
    tl.store(result + row * length + place, two.to(result.dtype.element_ty), mask=place < length)


@triton.jit(do_not_specialize=["rows"])
def wide_tile_kernel(
    x, data, grid, result, rows, outs, groups, x_stride, row_stride, splits, TYPE: tl.constexpr,
    ROWS: tl.constexpr, OUTS: tl.constexpr, CURVE: tl.constexpr,
):  # fmt: skip
    """Programs of the same weights are neighbours, so that weights are read once from memory. With
    a CURVE, a program multiplies by eight gates and their eight values in turn: a thread then has
    the sums of both. `outs` counts such pairs."""
    HELD: tl.constexpr = OUTS if CURVE is None else OUTS // 2
    tile, first_out, split = tl.program_id(0), tl.program_id(1) * HELD, tl.program_id(2)
    # A thread has group `index % 4` of a block, of an output and of the one eight after it.
    index = tl.arange(0, OUTS * 4)
    t, eight = index % 4, index // 32 % (OUTS // 16)
    second = index // (2 * OUTS)
    if CURVE is None:
        weight_row = tl.minimum(first_out + eight * 16 + second * 8 + index // 4 % 8, outs - 1)
    else:
        weight_row = tl.minimum(first_out + eight * 8 + index // 4 % 8, outs - 1) + second * outs
    weights = data + weight_row.to(tl.int64) * row_stride
    row = tile * ROWS + tl.arange(0, ROWS)
    source = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * x_stride
    source += tl.arange(0, 128)[None, :]
    total = tl.zeros([OUTS, ROWS], tl.float32)
    blocks = tl.cdiv(groups, 4)
    steps = tl.cdiv(blocks, splits)
    begin = split * steps
    following = packed(weights, tl.minimum(begin * 4 + t, groups - 1), groups, TYPE)
    wait_for_previous()
    for block in range(begin, tl.minimum(begin + steps, blocks)):
        some = tl.load(source + block * 128)
        g = block * 4 + t
        present = following
        following = packed(weights, tl.minimum(g + 4, groups - 1), groups, TYPE)
        part = unpacked(present, tl.minimum(g, groups - 1), grid, TYPE)
        part = stacked(numbers(part, TYPE)).to(x.dtype.element_ty)
        part = tl.permute(tl.reshape(part, [2, OUTS // 16, 8, 4, 16, 2]), (1, 0, 2, 4, 3, 5))
        total = finished(multiplied(tl.reshape(part, [OUTS, 128]), tl.trans(some), total))
    begin_next()
    if CURVE is not None:
        total = tl.permute(tl.reshape(total, [OUTS // 16, 2, 8, ROWS]), (0, 2, 3, 1))
        total = tl.reshape(gated(total, result.dtype.element_ty, CURVE), [HELD, ROWS])
    out = first_out + tl.arange(0, HELD)
    place = (split * rows + row).to(tl.int64)[None, :] * outs + out[:, None]
    exists = (row < rows)[None, :] & (out < outs)[:, None]
    tl.store(result + place, total.to(result.dtype.element_ty), mask=exists)
