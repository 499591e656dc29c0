"""Products of a few rows with a weight in planes: sums of products of integers.

A program computes a few outputs of all rows; each of its n threads sums every n-th group of 32
weights. This division depends on the shape of the weight only, so the bits of a row do not depend
on other rows.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.activations import Activations, Rounded, RoundedActivations, unrounded
from runtime.kernels.triton.curves import gated
from runtime.kernels.triton.groups import (
    grid_of,
    has_minima,
    is_halved,
    offset_of,
    packed,
    unpacked,
)
from runtime.kernels.triton.launch import divided, launch, next_power, with_adjacent_elements
from runtime.kernels.triton.overlap import begin_next, wait_for_previous
from runtime.kernels.triton.rounded import planes_of, rounded
from runtime.kernels.triton.words import dot, four_words, stacked, two_words
from runtime.quant.weight import Compute, Weight

_MOST_WARPS = 4
# A matrix with fewer outputs has more warps for each, so that its programs occupy the device.
_OUTS_WARPS = 8192
# Outputs per program by the number of rows, rounded up to a power of two: the fastest on an H200.
OUTS = {1: 2, 2: 4, 4: 4, 8: 4}
# Registers of a thread. The assembler takes fewer, for more threads, and then spills some.
MOST_REGISTERS = {1: None, 2: None, 4: 255, 8: 255}
MOST_EXPERT_REGISTERS = 168


def vector_products(x: Activations, weights: Sequence[Weight]) -> tuple[Tensor, ...]:
    """x [rows, in], one to MOST_ROUNDED_ROWS, weights (out, in) in planes -> [rows, out] each, in
    x's type.

    Activations are rounded as `Weight.compute` says, once for all weights with the same.
    """
    values = {compute: _rounded(x, compute) for compute in {each.compute for each in weights}}
    x = unrounded(x)
    columns = next_power(x.shape[0])
    results = tuple(
        torch.empty(x.shape[0], each.shape[0], dtype=x.dtype, device=x.device) for each in weights
    )
    for weight, result in zip(weights, results, strict=True):
        _launch(values[weight.compute], weight, result, columns)
    return results


def gated_vectors(x: Activations, weight: Weight, curve: int) -> Tensor:
    """x [rows, in], one to MOST_ROUNDED_ROWS, weight (2 n, in) in planes, rows of gates first ->
    [rows, n]: the curve of the gates times the others, both rounded to x's type before."""
    values, x = _rounded(x, weight.compute), unrounded(x)
    result = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    _launch(values, weight, result, next_power(x.shape[0]), curve=curve)
    return result


def expert_vectors(
    x: Activations, weight: Weight, chosen: Tensor, bias: Tensor | None, scale: Tensor | None
) -> Tensor:
    """As `expert_products`, of any number of pairs; each pair reads its expert's matrix."""
    pairs, outs, rows = chosen.numel(), weight.shape[1], unrounded(x)
    share = chosen.shape[1] if rows.dim() == 2 else 1
    factors = None if scale is None else scale.float().flatten()
    result = torch.empty(pairs, outs, dtype=rows.dtype, device=rows.device)
    values = _rounded(x, weight.compute, factors, share)
    share = share if scale is None else 1
    _launch(values, weight, result, 1, chosen.flatten(), bias, share)
    return result.view(*chosen.shape, outs)


def _rounded(
    x: Activations, compute: Compute, factors: Tensor | None = None, share: int = 1
) -> Rounded:
    """As `rounded`, of all rows of x [..., in]; an earlier launch may have done it."""
    planes, plain = planes_of(compute), factors is None
    if isinstance(x, RoundedActivations) and plain and len(x.rounded.planes) == planes:
        return x.rounded
    rows = with_adjacent_elements(unrounded(x).flatten(0, -2))
    return rounded(rows, planes, factors, share)


def _launch(
    values: Rounded,
    weight: Weight,
    result: Tensor,
    columns: int,
    chosen: Tensor | None = None,
    bias: Tensor | None = None,
    share: int = 1,
    *,
    curve: int | None = None,
) -> None:
    assert weight.type.blocks is not None
    outs, elements = result.shape[-1], weight.shape[-1]
    type, data = weight.type.blocks.name, weight.data
    warps, at_once = warps_of(weight.shape[-2], elements), OUTS[columns]
    held = at_once if curve is None else at_once // 2
    grid = divided(outs, held), 1 if chosen is None else chosen.shape[0]
    launch(
        vector_kernel, grid, values.planes, values.scales, values.sums, data,
        grid_of(type, data.device), chosen, bias, result, values.scales.shape[0], outs,
        elements // 32, data.stride(-2), data.stride(0), share, TYPE=type,
        PLANES=values.planes.shape[0], COLUMNS=columns, OUTS=at_once, CURVE=curve,
        GROUPS=32 * warps, num_warps=warps, num_stages=1,
        maxnreg=MOST_REGISTERS[columns] if chosen is None else MOST_EXPERT_REGISTERS,
        enable_fp_fusion=False, device=data.device, overlaps=True,
    )  # fmt: skip


def warps_of(outs: int, elements: int) -> int:
    """The warps of a program, whose threads have two groups of a row at least; they depend on the
    shape of the weight only."""
    wanted = next_power(divided(_OUTS_WARPS, outs))
    return min(_MOST_WARPS, wanted, next_power(divided(elements, 2 * 32 * 32)))


@triton.jit(do_not_specialize_on_alignment=["rows"])
def vector_kernel(
    planes, scales, sums, data, grid, chosen, bias, result, rows, outs, groups, row_stride,
    expert_stride, share, TYPE: tl.constexpr, PLANES: tl.constexpr, COLUMNS: tl.constexpr,
    OUTS: tl.constexpr, CURVE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of OUTS. With `chosen` [pairs], the second axis is pairs, and COLUMNS is 1.
    With a CURVE, a program multiplies by a gate and its value in turn; `outs` counts pairs.

    A thread loads the weights of its next group before it multiplies by those of the present one,
    so that memory has always something to do."""
    if chosen is not None:
        wait_for_previous()
    HELD: tl.constexpr = OUTS if CURVE is None else OUTS // 2
    first_out, pair = tl.program_id(0) * HELD, tl.program_id(1)
    if chosen is not None:
        expert = tl.load(chosen + pair).to(tl.int64)
        data += expert * expert_stride
    nothing = tl.zeros([GROUPS], tl.float32)
    totals = ()
    for _ in tl.static_range(OUTS * COLUMNS):
        totals = totals + (nothing,)
    weight_rows = _rows(data, first_out, outs, row_stride, OUTS, CURVE)
    following = _packed(weight_rows, tl.arange(0, GROUPS), groups, TYPE)
    # Registers of one group are not copied to those of another if a loop has two. More rows wait
    # for their instructions instead, and have no registers left.
    STEPS: tl.constexpr = 2 if COLUMNS == 1 else 1
    for begin in range(0, groups, STEPS * GROUPS):
        for step in tl.static_range(STEPS):
            g = begin + step * GROUPS + tl.arange(0, GROUPS)
            at = tl.minimum(g, groups - 1)
            present, following = following, _packed(weight_rows, g + GROUPS, groups, TYPE)
            if chosen is None:  # the first weights are loaded while what made the inputs ends
                wait_for_previous()
            weights = ()
            for out in tl.static_range(OUTS):
                weights = weights + (unpacked(present[out], at, grid, TYPE),)
            added = ()
            for column in tl.static_range(COLUMNS):
                row = tl.minimum(column, rows - 1) if chosen is None else pair // share
                place = row * groups + at
                if COLUMNS == 1:  # with more, this order takes registers
                    scale = tl.load(scales + place, mask=g < groups, other=0.0)
                numbers = _numbers(planes, place, rows * groups, PLANES)
                halves = two_words((sums + place * 2).to(tl.pointer_type(tl.uint8)))
                if COLUMNS > 1:
                    scale = tl.load(scales + place, mask=g < groups, other=0.0)
                for out in tl.static_range(OUTS):
                    sum = scale * _product(weights[out], numbers, halves, TYPE, PLANES)
                    added = added + (totals[column * OUTS + out] + sum,)
            totals = added
    begin_next()
    total = tl.sum(tl.reshape(stacked(totals), [GROUPS, OUTS * COLUMNS]), axis=0)
    if CURVE is not None:
        total = gated(tl.reshape(total, [HELD * COLUMNS, 2]), result.dtype.element_ty, CURVE)
    number = tl.arange(0, HELD * COLUMNS)
    out = first_out + number % HELD
    column = number // HELD if chosen is None else pair
    if bias is not None:
        total += tl.load(bias + expert * outs + out, mask=out < outs, other=0.0)
    place = tl.cast(column, tl.int64) * outs + out
    exists = (out < outs) & (number // HELD < rows)
    tl.store(result + place, total.to(result.dtype.element_ty), mask=exists)


@triton.jit
def _rows(data, first_out, outs, row_stride, OUTS: tl.constexpr, CURVE: tl.constexpr):
    """Pointers to the rows of OUTS outputs; with a CURVE, to gates and their values in turn."""
    found = ()
    for out in tl.static_range(OUTS):
        if CURVE is None:
            row = tl.minimum(first_out + out, outs - 1)
        else:
            row = tl.minimum(first_out + out // 2, outs - 1) + out % 2 * outs
        found = found + (data + row.to(tl.int64) * row_stride,)
    return found


@triton.jit
def _packed(rows, g, groups, TYPE: tl.constexpr):
    """Of each row the groups g [n], or the last one instead of those beyond."""
    found = ()
    for row in tl.static_range(len(rows)):
        found = found + (packed(rows[row], tl.minimum(g, groups - 1), groups, TYPE),)
    return found


@triton.jit
def _numbers(planes, place, count, PLANES: tl.constexpr):
    """Eight words of each plane with `count` groups."""
    at = planes.to(tl.pointer_type(tl.uint8)) + place * 16
    words = ()
    for _ in tl.static_range(2 * PLANES):
        words = words + four_words(at)
        at += tl.cast(count, tl.int64) * 16
    return words


@triton.jit
def _product(weights, numbers, halves, TYPE: tl.constexpr, PLANES: tl.constexpr):
    """float32 [n]: products of groups of weights with integers, whose sums are `halves`."""
    words, scales, minima = weights
    if is_halved(TYPE):
        first = _dot(words, numbers, 0, 4, PLANES) - offset_of(TYPE) * halves[0]
        second = _dot(words, numbers, 4, 4, PLANES) - offset_of(TYPE) * halves[1]
        result = scales[0] * first.to(tl.float32) + scales[1] * second.to(tl.float32)
        if has_minima(TYPE):
            result -= minima[0] * halves[0].to(tl.float32) + minima[1] * halves[1].to(tl.float32)
    else:
        whole = halves[0] + halves[1]
        number = _dot(words, numbers, 0, 8, PLANES) - offset_of(TYPE) * whole
        result = scales[0] * number.to(tl.float32)
        if has_minima(TYPE):
            result -= minima[0] * whole.to(tl.float32)
    return result


@triton.jit
def _dot(
    words, numbers, BEGIN: tl.constexpr, COUNT: tl.constexpr, PLANES: tl.constexpr
):  # fmt: skip
    total = words[0] * 0
    for part in tl.static_range(BEGIN, BEGIN + COUNT):
        total = dot(words[part], numbers[part], total)
    if PLANES == 2:
        total *= 128
        for part in tl.static_range(BEGIN, BEGIN + COUNT):
            total = dot(words[part], numbers[8 + part], total)
    return total
