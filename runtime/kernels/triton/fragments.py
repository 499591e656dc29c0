"""Products of up to 64 rows, or rows of an expert, by tensor cores, without shared memory.

The inner elements of a product may be in any order that both operands share. Four threads have the
elements of a weight's row that a tensor core multiplies at once; here each of them has a group of
32 of its own, as in `groups`, so that weights go from planes to tensor cores in the registers of
one thread. Rows of activations are copied into the order of such fragments before, once for all
weights.

A program computes some outputs of all rows; its warps divide the inner elements, and their sums are
added at the end. The division depends on the shape of the weight only.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.triton.bundles import Bundles, ExpertPairs, pairs_of
from runtime.kernels.triton.curves import gated
from runtime.kernels.triton.dequantize import numbers
from runtime.kernels.triton.groups import grid_of, packed, unpacked
from runtime.kernels.triton.launch import divided, launch, next_power
from runtime.kernels.triton.overlap import begin_next, wait_for_previous
from runtime.kernels.triton.words import multiplied, stacked
from runtime.quant.weight import Weight

MOST_ROWS = 64
OUTS = 16  # of a program
_MOST_WARPS = 8
# Warps that occupy an H100, some 20 for each multiprocessor.
_WARPS = 2640
# Registers of a thread by the rows of a program. The assembler takes fewer, for more threads, and
# then loads weights and activations just before they are needed.
MOST_REGISTERS = {8: 128, 16: 168, 32: 168, 64: 255}
# Adjacent inner elements that a thread has of an operand. Triton chooses them, and four for values
# that a loop carries; with another number results are right, but threads exchange elements.
_ADJACENT = tl.constexpr(4)


def fragment_products(
    x: Tensor, weights: Sequence[Weight], operands: torch.dtype
) -> tuple[Tensor, ...]:
    """x [rows, in], one to MOST_ROWS, rounded to `operands` of 16 bits, weights (out, in) in planes
    -> [rows, out] each, in x's type."""
    fragments = arranged(x, operands)
    return tuple(_product(fragments, x, weight) for weight in weights)


def gated_fragments(x: Tensor, weight: Weight, curve: int) -> Tensor:
    """x [rows, in] of 16 bits, one to MOST_ROWS, weight (2 n, in) in planes, rows of gates first ->
    [rows, n]: the curve of the gates times the others, both rounded to x's type before."""
    return _product(arranged(x, x.dtype), x, weight, curve)


def expert_fragments(
    x: Tensor,
    weight: Weight,
    bundles: Bundles,
    shape: torch.Size,
    bias: Tensor | None,
    scale: Tensor | None,
) -> Tensor:
    """As `expert_products`; `shape`: [tokens, used] of the pairs in the bundles, whose size is one
    of `program_rows`."""
    result = torch.empty(shape.numel(), weight.shape[1], dtype=x.dtype, device=x.device)
    pairs = pairs_of(x, bundles, shape, bias, scale)
    _launch(arranged(x.flatten(0, -2), x.dtype, pairs), weight, result, pairs=pairs)
    return result.view(*shape, weight.shape[1])


def program_rows(rows: int) -> int:
    """Rows of a program that computes so many."""
    return max(8, next_power(rows))


def arranged(x: Tensor, dtype: torch.dtype, pairs: ExpertPairs | None = None) -> Tensor:
    """x [rows, in], whose elements are adjacent -> its fragments [tiles of 8 rows, blocks of 128
    elements, 4, 8, 4, 8] in `dtype`; what x lacks is 0.

    Dimensions of a block: a quarter of each group, row, group, and the quarter's elements in the
    order 0 1 4 5 2 3 6 7, of which tensor cores take pairs. With `pairs`, the rows are those of
    their bundles; tiles of none are not written.
    """
    assert x.stride(1) == 1, x.stride()
    rows, elements = x.shape
    tiles, blocks = program_rows(rows) // 8, _blocks(elements)
    order, share = None, 1
    if pairs is not None:
        order, share = pairs.bundles.pairs, pairs.share
        rows, tiles = rows * share, order.numel() // 8
    result = torch.empty(tiles, blocks, 4, 8, 4, 8, dtype=dtype, device=x.device)
    launch(
        arrange_kernel, (blocks, tiles), x, order, result, rows, elements // 32, blocks,
        x.stride(0), share, num_warps=4, device=x.device, overlaps=True,
    )  # fmt: skip
    return result


def _product(fragments: Tensor, x: Tensor, weight: Weight, curve: int | None = None) -> Tensor:
    outs = weight.shape[0] if curve is None else weight.shape[0] // 2
    result = torch.empty(x.shape[0], outs, dtype=x.dtype, device=x.device)
    _launch(fragments, weight, result, curve=curve)
    return result


def _launch(
    fragments: Tensor,
    weight: Weight,
    result: Tensor,
    *,
    pairs: ExpertPairs | None = None,
    curve: int | None = None,
) -> None:
    """result [rows or pairs, outs]."""
    assert weight.type.blocks is not None
    type, data = weight.type.blocks.name, weight.data
    (rows, outs), elements = result.shape, weight.shape[-1]
    held = OUTS if curve is None else OUTS // 2
    columns, count = program_rows(rows), 1
    optional: tuple[Tensor | None, ...] = (None, None, None, None)
    if pairs is not None:
        bundles = pairs.bundles
        count, columns = bundles.pairs.shape
        optional = bundles.experts, bundles.pairs, pairs.factors, pairs.bias
    warps = warps_of(weight.shape[-2], elements)
    launch(
        fragment_kernel, (count, divided(outs, held)), fragments, data,
        grid_of(type, data.device), *optional, result, rows, outs, elements // 32,
        fragments.shape[1], data.stride(-2), data.stride(0), TYPE=type, ROWS=columns, OUTS=OUTS,
        WARPS=warps, CURVE=curve, num_warps=warps, num_stages=1,
        maxnreg=MOST_REGISTERS[columns], device=data.device, overlaps=True,
    )  # fmt: skip


def _blocks(elements: int) -> int:
    """Blocks of 128 elements, with those that fill up the pairs of steps of all warps."""
    each = 2 * most_warps(elements)
    return divided(divided(elements, 128), each) * each


def warps_of(outs: int, elements: int) -> int:
    """The warps of a program; they depend on the shape of the weight only."""
    wanted = next_power(divided(_WARPS, divided(outs, OUTS)))
    return min(most_warps(elements), wanted)


def most_warps(elements: int) -> int:
    """Each has a pair of steps at least, if there are so many."""
    pairs = divided(elements, 128) // 2
    return min(_MOST_WARPS, 1 << max(0, pairs.bit_length() - 1))


@triton.jit(do_not_specialize=["rows"])
def arrange_kernel(x, pairs, result, rows, groups, blocks, row_stride, share):
    """A program arranges a block of 8 rows."""
    begin_next()
    wait_for_previous()
    block, tile = tl.program_id(0), tl.program_id(1)
    piece = tl.arange(0, 128)
    quarter, row, group = piece // 32, tile * 8 + piece // 4 % 8, block * 4 + piece % 4
    if pairs is not None:
        if tl.load(pairs + tile * 8) == rows:
            return
        row = tl.load(pairs + row)
    source = x + (row // share).to(tl.int64) * row_stride + group * 32 + quarter * 8
    exists = (row < rows) & (group < groups)
    eight = tl.load(source[:, None] + tl.arange(0, 8)[None, :], mask=exists[:, None], other=0.0)
    eight = tl.permute(tl.reshape(eight, [128, 2, 2, 2]), (0, 2, 1, 3))
    place = (tile * blocks + block).to(tl.int64) * 1024 + piece * 8
    eight = tl.reshape(eight, [128, 8]).to(result.dtype.element_ty)
    tl.store(result + place[:, None] + tl.arange(0, 8)[None, :], eight)


@triton.jit(do_not_specialize=["rows"])
def fragment_kernel(
    fragments, data, grid, experts, pairs, factors, bias, result, rows, outs, groups, blocks,
    row_stride, expert_stride, TYPE: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr,
    WARPS: tl.constexpr, CURVE: tl.constexpr,
):  # fmt: skip
    """`rows` counts rows or, with `pairs`, pairs of a row and an expert. With a CURVE, a program
    multiplies by eight gates and their eight values in turn; `outs` counts such pairs."""
    HELD: tl.constexpr = OUTS if CURVE is None else OUTS // 2
    bundle, first_out = tl.program_id(0), tl.program_id(1) * HELD
    if pairs is not None:
        wait_for_previous()
        if tl.load(pairs + bundle * ROWS) == rows:
            return
        expert = tl.load(experts + bundle).to(tl.int64)
        data += expert * expert_stride
    steps = tl.cdiv(tl.cdiv(groups, 4), 2 * WARPS) * 2
    # A thread has group `index % 4` of a block, of eight outputs after another.
    index = tl.arange(0, OUTS * 4 * WARPS)
    place = index // 4 % 8 + index // (32 * WARPS) * 8
    if CURVE is None:
        weight_row = tl.minimum(first_out + place, outs - 1)
    else:
        weight_row = tl.minimum(first_out + place // 16 * 8 + place % 8, outs - 1)
        weight_row += place % 16 // 8 * outs
    weights = data + weight_row.to(tl.int64) * row_stride
    g = index // 32 % WARPS * steps * 4 + index % 4
    index = tl.arange(0, ROWS * 4 * WARPS)
    place = (bundle * (ROWS // 8) + index // (32 * WARPS)).to(tl.int64) * blocks
    source = fragments + (place + index // 32 % WARPS * steps) * 1024 + index % 32 * 8
    total = tl.zeros([WARPS, OUTS, ROWS], tl.float32)
    # The next weights are loaded during the products of those before.
    following = packed(weights, tl.minimum(g, groups - 1), groups, TYPE)
    if pairs is None:
        wait_for_previous()
    # A loop of two steps: registers of one are not copied to those of the other.
    for begin in range(0, steps, 2):
        for odd in tl.static_range(2):
            step = begin + odd
            present, at = following, tl.minimum(g + step * 4, groups - 1)
            following = packed(weights, tl.minimum(g + step * 4 + 4, groups - 1), groups, TYPE)
            activations = _activations(source + step * 1024, ROWS, WARPS)
            part = unpacked(present, at, grid, TYPE)
            part = _weights(part, TYPE, OUTS, WARPS, fragments.dtype.element_ty)
            total = multiplied(part, activations, total)
    begin_next()
    total = tl.sum(total, axis=0)
    if CURVE is not None:
        total = tl.permute(tl.reshape(total, [OUTS // 16, 2, 8, ROWS]), (0, 2, 3, 1))
        total = tl.reshape(gated(total, result.dtype.element_ty, CURVE), [HELD, ROWS])
    out, row = first_out + tl.arange(0, HELD), bundle * ROWS + tl.arange(0, ROWS)
    if pairs is not None:
        row = tl.load(pairs + row)
    if factors is not None:
        total *= tl.load(factors + row, mask=row < rows, other=0.0)[None, :]
    if bias is not None:
        total += tl.load(bias + expert * outs + out, mask=out < outs, other=0.0)[:, None]
    place = row.to(tl.int64)[None, :] * outs + out[:, None]
    exists = (row < rows)[None, :] & (out < outs)[:, None]
    tl.store(result + place, total.to(result.dtype.element_ty), mask=exists)


@triton.jit
def _weights(
    part, TYPE: tl.constexpr, OUTS: tl.constexpr, WARPS: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Groups of weights [n] -> [WARPS, OUTS, 128]."""
    UPPER: tl.constexpr = 32 // _ADJACENT
    values = stacked(numbers(part, TYPE)).to(dtype)
    values = tl.reshape(values, [OUTS // 8, WARPS, 8, 4, UPPER, _ADJACENT])
    return tl.reshape(tl.permute(values, (1, 0, 2, 4, 3, 5)), [WARPS, OUTS, 128])


@triton.jit
def _activations(source, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """Pointers to the first quarters of groups [n] -> [WARPS, 128, ROWS]."""
    UPPER: tl.constexpr = 32 // _ADJACENT
    quarters = (_quarter(source), _quarter(source + 256))
    quarters = quarters + (_quarter(source + 512), _quarter(source + 768))
    values = tl.reshape(stacked(quarters), [ROWS // 8, WARPS, 8, 4, 8, 4])
    values = tl.permute(values, (1, 0, 2, 3, 5, 4))
    values = tl.reshape(values, [WARPS, ROWS, 4, UPPER, _ADJACENT])
    values = tl.reshape(tl.permute(values, (0, 1, 3, 2, 4)), [WARPS, ROWS, 128])
    return tl.permute(values, (0, 2, 1))


@triton.jit
def _quarter(at):
    """[n] pointers -> [n, 8] elements in order; see `arranged`."""
    eight = tl.load(at[:, None] + tl.arange(0, 8)[None, :])
    eight = tl.permute(tl.reshape(eight, [at.shape[0], 2, 2, 2]), (0, 2, 1, 3))
    return tl.reshape(eight, [at.shape[0], 8])
