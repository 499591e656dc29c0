"""Products of tiles of rows with weights in planes or plain numbers, converted in registers.

Weights are converted to the rows' type, as in the twins, and multiplied by tensor cores, float32 as
sums of shorter numbers. Where a weight has few outputs, programs divide its inputs, and a second
launch adds their partial sums. Deterministic weights have one size of tiles, so the partial sums of
a row depend on the weight only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.triton.bundles import Bundles, ExpertPairs, pairs_of
from runtime.kernels.triton.curves import gated
from runtime.kernels.triton.dequantize import group_values
from runtime.kernels.triton.groups import grid_of
from runtime.kernels.triton.launch import divided, launch
from runtime.kernels.triton.pointwise import gate
from runtime.kernels.triton.words import finished, multiplied
from runtime.quant.weight import Weight

_SUMMED = 512
PLAIN = tl.constexpr("numbers")  # the type of weights that are not in blocks


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of a tile. `rows`, `outs`: per program; `groups`: groups of 32 inputs that it reads at
    once; `programs`: programs that occupy an H100 with `stages` of loads in flight each."""

    rows: int
    outs: int
    groups: int
    warps: int
    programs: int = 528
    stages: int = 3


# What fits into the registers of a thread.
_TILINGS = (Tiling(64, 64, 2, 4, stages=1), Tiling(128, 128, 2, 8, programs=132))
_FLOAT_TILINGS = (Tiling(16, 64, 2, 4), Tiling(32, 64, 2, 4))


def tilings(dtype: torch.dtype, numbers: torch.dtype | None = None) -> tuple[Tiling, ...]:
    """The tilings of products of rows of this type with planes or `numbers`, the fewest rows first.

    The largest tile with loads of numbers of 32 bits in flight does not fit into the shared memory
    of small devices.
    """
    if dtype == torch.float32:
        return _FLOAT_TILINGS
    return _TILINGS if numbers is None or numbers.itemsize <= 2 else _TILINGS[:1]


def most_rows(x: Tensor, weight: Weight) -> int:
    """The number of rows up to which tiles dequantise: those of the largest tile. On an H200,
    dequantising to memory for cuBLAS takes as long as tiles with 128 rows, and a fifth less with
    256.
    """
    return tilings(x.dtype, weight.number_type)[-1].rows


def bundle_size(dtype: torch.dtype, rows: int | None) -> int:
    """Rows of a tile for experts with `rows` rows each, more than fragments take; of deterministic
    weights, for any number."""
    if rows is None or dtype != torch.float32:
        return fixed_tiling(dtype).rows
    return _tiling(_FLOAT_TILINGS, rows).rows


def fixed_tiling(dtype: torch.dtype) -> Tiling:
    """The tiling of products with deterministic weights, for any number of rows of this type."""
    return replace(_FLOAT_TILINGS[-1] if dtype == torch.float32 else _TILINGS[0], programs=132)


def _tiling(known: Sequence[Tiling], rows: int) -> Tiling:
    """The smallest tiling with at least `rows` rows, else the largest."""
    return next((tiling for tiling in known if tiling.rows >= rows), known[-1])


def tile_product(x: Tensor, weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """x [rows, in], weight (out, in), `by_triton` -> [rows, out] in `dtype`, by default x's."""
    (rows, _), outs, dtype = x.shape, weight.shape[0], dtype or x.dtype
    tiling = _tiling_of(x, weight)
    splits = splits_of(weight, tiling)
    result = torch.empty(rows, outs, dtype=dtype, device=x.device)
    if splits == 1:
        _launch(x, weight, result, tiling)
        return result
    parts = torch.empty(splits, rows, outs, dtype=torch.float32, device=x.device)
    _launch(x, weight, parts, tiling, splits=splits)
    add_parts(parts, result)
    return result


def gated_tiles(x: Tensor, weight: Weight, curve: int) -> Tensor:
    """x [rows, in], weight (2 n, in), `by_triton`, rows of gates first -> [rows, n]: the curve of
    the gates times the others, both rounded to x's type before."""
    tiling = _tiling_of(x, weight)
    if splits_of(weight, tiling) > 1:
        return gate(curve, *tile_product(x, weight).chunk(2, dim=1))
    result = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    _launch(x, weight, result, tiling, curve=curve)
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
    result = torch.empty(shape.numel(), weight.shape[1], dtype=x.dtype, device=x.device)
    pairs = pairs_of(x, bundles, shape, bias, scale)
    tiling = _tiling(tilings(x.dtype), bundles.pairs.shape[1])
    _launch(x.flatten(0, -2), weight, result, tiling, pairs=pairs)
    return result.view(*shape, weight.shape[1])


def splits_of(weight: Weight, tiling: Tiling) -> int:
    """Number of parts that the inputs are divided into; depends on the shape and the tiling only.

    As many as occupy the device, but partial sums, written and read with 4 bytes each, may move at
    most half as many bytes as the rows of a program, which have 64 per group of 32."""
    outs, groups = divided(weight.shape[0], tiling.outs), weight.shape[1] // 32
    wanted = min(tiling.programs // max(1, outs), groups // (tiling.outs // 4))
    return 1 << max(0, wanted.bit_length() - 1)


def add_parts(parts: Tensor, result: Tensor) -> None:
    """parts [splits, rows, outs], float32; result [rows, outs]: their sums."""
    count = result.numel()
    launch(
        sum_kernel, (divided(count, _SUMMED),), parts, result, count, SPLITS=len(parts),
        SIZE=_SUMMED, num_warps=4, device=result.device,
    )  # fmt: skip


def _tiling_of(x: Tensor, weight: Weight) -> Tiling:
    if weight.deterministic:
        return fixed_tiling(x.dtype)
    return _tiling(tilings(x.dtype, weight.number_type), x.shape[0])


def _launch(
    x: Tensor,
    weight: Weight,
    result: Tensor,
    tiling: Tiling,
    *,
    splits: int = 1,
    pairs: ExpertPairs | None = None,
    curve: int | None = None,
) -> None:
    """result [rows, outs], or [splits, rows, outs]. curve: of gates; see `gated_tiles`."""
    assert x.stride(1) == 1, x.stride()
    x, data, type = _operands(x, weight)
    outs, elements = result.shape[-1], x.shape[1]
    held = tiling.outs if curve is None else tiling.outs // 2
    rows, tiles, share = x.shape[0], divided(x.shape[0], tiling.rows), 1
    optional: tuple[Tensor | None, ...] = (None, None, None, None)
    if pairs is not None:
        bundles, share = pairs.bundles, pairs.share
        rows, tiles = result.shape[0], bundles.experts.shape[0]
        optional = bundles.experts, bundles.pairs, pairs.factors, pairs.bias
    launch(
        tile_kernel, (tiles, divided(outs, held), splits), x, data,
        None if type == PLAIN.value else grid_of(type, data.device), *optional, result, rows, outs,
        elements // 32, x.stride(0),
        data.stride(-2), data.stride(0), share, TYPE=type, ROWS=tiling.rows, OUTS=tiling.outs,
        GROUPS=tiling.groups, SPLITS=splits, CURVE=curve, num_warps=tiling.warps,
        num_stages=tiling.stages, device=data.device,
    )  # fmt: skip


def _operands(x: Tensor, weight: Weight) -> tuple[Tensor, Tensor, str]:
    """x, the weight's data and its type: planes of uint8, or numbers with PLAIN. x and numbers are
    padded with zeros to whole groups."""
    if weight.type.blocks is not None:
        return x, weight.data, weight.type.blocks.name
    numbers = weight.numbers()
    data = weight.dequantize() if numbers is None else numbers
    missing = -x.shape[1] % 32
    if missing:
        x, data = F.pad(x, (0, missing)), F.pad(data, (0, missing))
    return x, data, PLAIN.value


@triton.jit(do_not_specialize=["rows"])
def tile_kernel(
    x, data, grid, experts, pairs, factors, bias, result, rows, outs, groups, x_stride, row_stride,
    expert_stride, share, TYPE: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr,
    GROUPS: tl.constexpr, SPLITS: tl.constexpr, CURVE: tl.constexpr,
):  # fmt: skip
    """Rows are those of x or, with `pairs`, pairs of a row and an expert; `rows` counts either.

    Programs of the same weights are neighbours, so that weights are read once from memory. With a
    CURVE, a program multiplies by eight gates and their eight values in turn: a thread then has the
    sums of both. `outs` counts such pairs.
    """
    HELD: tl.constexpr = OUTS if CURVE is None else OUTS // 2
    tile, first_out, split = tl.program_id(0), tl.program_id(1) * HELD, tl.program_id(2)
    row = tile * ROWS + tl.arange(0, ROWS)
    if pairs is not None:
        if tl.load(pairs + tile * ROWS) == rows:
            return
        expert = tl.load(experts + tile).to(tl.int64)
        data += expert * expert_stride
        row = tl.load(pairs + row)
    source = x + (tl.minimum(row, rows - 1) // share).to(tl.int64) * x_stride
    # One group of 32 weights after the other, GROUPS of each row.
    index = tl.arange(0, OUTS * GROUPS)
    place = index // GROUPS
    if CURVE is None:
        weight_row = tl.minimum(first_out + place, outs - 1)
    else:
        weight_row = tl.minimum(first_out + place // 16 * 8 + place % 8, outs - 1)
        weight_row += place % 16 // 8 * outs
    weights = data + weight_row.to(tl.int64) * row_stride
    within = tl.arange(0, GROUPS * 32)
    total = tl.zeros([OUTS, ROWS], tl.float32)
    steps = tl.cdiv(tl.cdiv(groups, GROUPS), SPLITS) * GROUPS
    for begin in range(split * steps, tl.minimum((split + 1) * steps, groups), GROUPS):
        g = tl.minimum(begin + index % GROUPS, groups - 1)
        if TYPE == PLAIN:
            values = tl.load((weights + g * 32)[:, None] + tl.arange(0, 32)[None, :])
            values = values.to(tl.float32).to(x.dtype.element_ty)
        else:
            values = group_values(weights, g, groups, grid, TYPE).to(x.dtype.element_ty)
        column = begin * 32 + within
        exists = (row < rows)[:, None] & (column < groups * 32)[None, :]
        some = tl.load(source[:, None] + column[None, :], mask=exists, other=0.0)
        values = tl.reshape(values, [OUTS, GROUPS * 32])
        total = finished(multiplied(values, tl.trans(some), total))
    if CURVE is not None:
        total = tl.permute(tl.reshape(total, [OUTS // 16, 2, 8, ROWS]), (0, 2, 3, 1))
        total = tl.reshape(gated(total, result.dtype.element_ty, CURVE), [HELD, ROWS])
    out = first_out + tl.arange(0, HELD)
    if factors is not None:
        total *= tl.load(factors + row, mask=row < rows, other=0.0)[None, :]
    if bias is not None:
        total += tl.load(bias + expert * outs + out, mask=out < outs, other=0.0)[:, None]
    at = (split * rows + row).to(tl.int64)[None, :] * outs + out[:, None]
    exists = (row < rows)[None, :] & (out < outs)[:, None]
    tl.store(result + at, total.to(result.dtype.element_ty), mask=exists)


@triton.jit
def sum_kernel(parts, result, count, SPLITS: tl.constexpr, SIZE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.float32)
    for split in tl.static_range(SPLITS):
        at = parts + tl.cast(count, tl.int64) * split + place
        total += tl.load(at, mask=place < count, other=0.0)
    tl.store(result + place, total.to(result.dtype.element_ty), mask=place < count)
