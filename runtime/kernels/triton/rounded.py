"""Activations rounded to integers, with one scale for each group of 32 elements of a row.

Integers have 8 bits with one plane, and 15 bits with two: 128 times the first plus the second.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.activations import Rounded
from runtime.kernels.triton.launch import divided, launch
from runtime.kernels.triton.overlap import begin_next, wait_for_previous
from runtime.quant.weight import Compute

GROUPS = 32  # groups per program


def planes_of(compute: Compute) -> int:
    """The number of planes to which products round activations."""
    return 1 if compute is Compute.FAST else 2


def empty_rounded(rows: int, elements: int, planes: int, device: torch.device) -> Rounded:
    groups = elements // 32
    return Rounded(
        torch.empty(planes, 2, rows, groups, 16, dtype=torch.int8, device=device),
        torch.empty(rows, groups, dtype=torch.float32, device=device),
        torch.empty(rows, groups, 2, dtype=torch.int32, device=device),
    )


def rounded(x: Tensor, planes: int, factors: Tensor | None = None, share: int = 1) -> Rounded:
    """Round x [rows, in]. With `factors` float32 [pairs], round row n // share times factors[n] for
    each pair n instead: [pairs, in]."""
    assert x.stride(1) == 1, x.stride()
    rows, groups = x.shape[0] if factors is None else factors.shape[0], x.shape[1] // 32
    result = empty_rounded(rows, x.shape[1], planes, x.device)
    count = rows * groups
    launch(
        round_kernel, (divided(count, GROUPS),), x, factors, result.planes, result.scales,
        result.sums, count, groups, x.stride(0), SHARE=1 if factors is None else share,
        PLANES=planes, GROUPS=GROUPS, num_warps=1, enable_fp_fusion=False, device=x.device,
        overlaps=True,
    )  # fmt: skip
    return result


@triton.jit(do_not_specialize=["count"])
def round_kernel(
    x, factors, planes, scales, sums, count, groups, row_stride,
    SHARE: tl.constexpr, PLANES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    begin_next()
    wait_for_previous()
    place = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    inside = tl.minimum(place, count - 1)
    row, exists = inside // groups, place < count
    within = (inside % groups)[:, None] * 32 + tl.arange(0, 32)[None, :]
    values = tl.load(x + (row // SHARE).to(tl.int64)[:, None] * row_stride + within)
    values = values.to(tl.float32)
    if factors is not None:
        values *= tl.load(factors + row)[:, None]
    store_rounded(values, place, exists, planes, scales, sums, count, PLANES)


@triton.jit
def store_rounded(
    values, place, exists, planes, scales, sums, count, PLANES: tl.constexpr
):  # fmt: skip
    """Round groups of values, float32 [n, 32], and store those that exist as the groups `place` [n]
    of `count`. Products and sums must not be fused.

    Threads of a product load 16 bytes of adjacent groups each, so halves of groups are apart."""
    largest: tl.constexpr = 127.0 if PLANES == 1 else 127.0 * 128.0
    top = tl.max(tl.abs(values), axis=1)
    factor = tl.where(top > 0, tl.minimum(tl.div_rn(largest, top), 3.0e38), 0.0)
    half_even: tl.constexpr = 12582912.0  # numbers of this size are integers
    numbers = (((values * factor[:, None]) + half_even) - half_even).to(tl.int32)
    # A number that is not finite makes the scale NaN, and so all products with the group.
    scale = tl.div_rn(top, largest) + tl.sum(values * 0.0, axis=1)
    tl.store(scales + place, scale, mask=exists)
    halves = tl.sum(tl.reshape(numbers, [values.shape[0], 2, 16]), axis=2)
    at = place[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(sums + at, halves, mask=exists[:, None])
    first = numbers if PLANES == 1 else (numbers + 64) >> 7
    of_group, half = tl.arange(0, 32)[None, :], tl.cast(count, tl.int64) * 16
    at = place.to(tl.int64)[:, None] * 16 + of_group // 16 * half + of_group % 16
    tl.store(planes + at, first.to(tl.int8), mask=exists[:, None])
    if PLANES == 2:
        tl.store(planes + 2 * half + at, (numbers - first * 128).to(tl.int8), mask=exists[:, None])
