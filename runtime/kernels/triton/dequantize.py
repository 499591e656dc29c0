"""Rows of weights in planes to numbers, by one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.triton.groups import grid_of, group, has_minima, offset_of
from runtime.kernels.triton.launch import divided, launch
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


@triton.jit
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
    words, scales, minima = group(row, g, groups, grid, TYPE)
    low = tl.join(tl.join(words[0], words[4]), tl.join(words[2], words[6]))
    high = tl.join(tl.join(words[1], words[5]), tl.join(words[3], words[7]))
    packed = tl.reshape(tl.join(low, high), [g.shape[0], 2, 4, 1])
    shifts = 24 - 8 * tl.arange(0, 4)
    numbers = ((packed << shifts[None, None, None, :]) >> 24) - offset_of(TYPE)
    values = tl.reshape(numbers.to(tl.float32), [g.shape[0], 2, 16])
    values = values * tl.join(scales[0], scales[1])[:, :, None]
    if has_minima(TYPE):
        values = values - tl.join(minima[0], minima[1])[:, :, None]
    return tl.reshape(values, [g.shape[0], 32])
