"""Rows of weights in planes to numbers, by one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.triton.groups import grid_of, group, has_minima, is_signed, offset_of
from runtime.kernels.triton.launch import divided, launch
from runtime.kernels.triton.words import floats, stacked
from runtime.quant.weight import Weight

GROUPS = 128  # groups of a program: one per thread


def dequantized(weight: Weight, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    """weight (rows, in) in planes -> [rows, in], or the rows `ids` [n] int64, which exist."""
    assert weight.type.blocks is not None
    rows, elements = weight.shape
    rows = rows if ids is None else ids.shape[0]
    out = torch.empty(rows, elements, dtype=dtype, device=weight.data.device)
    groups, type = elements // 32, weight.type.blocks.name
    count = rows * groups
    launch(
        dequantize_kernel, (divided(count, GROUPS),), weight.data, ids, out,
        grid_of(type, out.device), count, groups, weight.data.stride(0),
        TYPE=type, GROUPS=GROUPS, num_warps=GROUPS // 32, device=out.device,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count"])
def dequantize_kernel(
    data, ids, out, grid, count, groups, row_stride, TYPE: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    inside = tl.minimum(place, count - 1)
    rows = inside // groups
    rows = rows.to(tl.int64) if ids is None else tl.load(ids + rows)
    values = group_values(data + rows * row_stride, inside % groups, groups, grid, TYPE)
    at = place.to(tl.int64)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(out + at, values.to(out.dtype.element_ty), mask=place[:, None] < count)


@triton.jit
def group_values(row, g, groups, grid, TYPE: tl.constexpr):
    """As `group`, but float32 [n, 32]."""
    return tl.reshape(stacked(numbers(group(row, g, groups, grid, TYPE), TYPE)), [g.shape[0], 32])


@triton.jit
def numbers(weights, TYPE: tl.constexpr):
    """What `group` returns -> its 32 weights in order, each float32 [n]."""
    words, scales, minima = weights
    result = ()
    for part in tl.static_range(8):
        four = floats(words[part], offset_of(TYPE), is_signed(TYPE))
        for byte in tl.static_range(4):
            value = four[byte] * scales[part // 4]
            if has_minima(TYPE):
                value = value - minima[part // 4]
            result = result + (value,)
    return result
