"""Writes of keys and values to the cache on CUDA devices."""

import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.cache_rows import RANGES
from runtime.kernels.triton.cache_rows import BLOCK_BYTES, kernel_pages
from runtime.kernels.triton.e4m3 import to_e4m3
from runtime.kernels.triton.launch import launch, with_adjacent_elements
from runtime.worker.model import AttentionPlan, LayerPages

# Number of elements that a program writes at once.
ELEMENTS = 1024


@triton.jit
def clamp(x, most):
    """x limited to [-most, most]; NaN stays NaN."""
    x = tl.where(x > most, most, x)
    return tl.where(x < -most, -most, x)


@triton.jit
def as_stored(x, most, TYPE: tl.constexpr):
    """float32 as a float of TYPE, at most `most`; bytes are E4M3."""
    x = clamp(x, most)
    return to_e4m3(x) if tl.uint8 == TYPE else x.to(TYPE)


@triton.jit
def _inverse(scale):
    """0 for scales of 0 and NaN."""
    inverts = tl.abs(scale) > 0
    return tl.where(inverts, tl.div_rn(1.0, tl.where(inverts, scale, 1.0)), 0.0)


@triton.jit
def _store_q8_0(block, at, stored, halves, exists):
    """block [n, 32] -> [n] blocks at `at`; halves are rounded away from 0."""
    scale = tl.div_rn(tl.max(tl.abs(block), 1), 127.0)
    scale = tl.where(tl.max((block != block).to(tl.int32), 1) > 0, float("nan"), scale)
    value = block * _inverse(scale)[:, None]
    value = clamp(tl.where(value == value, value, 0.0), 127.0)
    whole = value.to(tl.int32)
    code = whole + ((value - whole.to(tl.float32)) * 2.0).to(tl.int32)
    tl.store(halves + at // 2, scale.to(tl.float16), mask=exists)
    byte = at[:, None] + 2 + tl.arange(0, 32)[None, :]
    tl.store(stored + byte, code.to(tl.uint8), mask=exists[:, None])


@triton.jit
def _furthest(half):
    """[n, 16] -> [n] each: the first element furthest from 0, and its magnitude."""
    far = tl.abs(half)
    index = tl.argmax(far, 1, tie_break_left=True)
    chosen = tl.arange(0, 16)[None, :] == index[:, None]
    return tl.sum(tl.where(chosen, half, 0.0), 1), tl.max(far, 1)


@triton.jit
def _q4_0_codes(half, inverse):
    value = half * inverse[:, None]
    value = clamp(tl.where(value == value, value, 0.0), 8.0)
    return tl.minimum(value + 8.5, 15.0).to(tl.uint8)


@triton.jit
def _store_q4_0(low, high, at, stored, halves, exists):
    """Elements 0 to 15 and 16 to 31 of [n] blocks; the one furthest from 0 becomes -8."""
    first, first_far = _furthest(low)
    second, second_far = _furthest(high)
    scale = tl.where(first_far >= second_far, first, second) / -8.0
    nan = tl.max((low != low).to(tl.int32) | (high != high).to(tl.int32), 1) > 0
    scale = tl.where(nan, float("nan"), scale)
    inverse = _inverse(scale)
    code = _q4_0_codes(low, inverse) | _q4_0_codes(high, inverse) << 4
    tl.store(halves + at // 2, scale.to(tl.float16), mask=exists)
    byte = at[:, None] + 2 + tl.arange(0, 16)[None, :]
    tl.store(stored + byte, code, mask=exists[:, None])


@triton.jit
def _write_row(
    rows, stored, halves, row, cell, row_stride, head_stride, most,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Write all heads of a row to its cell."""
    if BLOCK == 0:
        for start in range(0, HEADS * DIM, AT_ONCE):
            index = start + tl.arange(0, AT_ONCE)
            exists = index < HEADS * DIM
            at = rows + row * row_stride + index // DIM * head_stride + index % DIM
            value = tl.load(at, mask=exists, other=0.0).to(tl.float32)
            value = as_stored(value, most, stored.dtype.element_ty)
            tl.store(stored + cell * (HEADS * DIM) + index, value, mask=exists)
    else:
        COUNT: tl.constexpr = (DIM + 31) // 32
        for start in range(0, HEADS * COUNT, AT_ONCE // 32):
            index = start + tl.arange(0, AT_ONCE // 32)
            exists = index < HEADS * COUNT
            at = (cell * (HEADS * COUNT) + index) * BLOCK
            source = rows + row * row_stride + index // COUNT * head_stride
            first = index % COUNT * 32
            if BLOCK == 34:
                block = _load_elements(source, first, exists, most, DIM, 32)
                _store_q8_0(block, at, stored, halves, exists)
            else:
                low = _load_elements(source, first, exists, most, DIM, 16)
                high = _load_elements(source, first + 16, exists, most, DIM, 16)
                _store_q4_0(low, high, at, stored, halves, exists)


@triton.jit
def _load_elements(source, first, exists, most, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """[n, WIDTH] float32 of heads at `source` [n], from elements `first` on; zero beyond DIM."""
    element = first[:, None] + tl.arange(0, WIDTH)[None, :]
    mask = exists[:, None] & (element < DIM)
    return clamp(tl.load(source[:, None] + element, mask=mask, other=0.0).to(tl.float32), most)


@triton.jit
def write_kernel(
    keys, values, stored_keys, key_halves, stored_values, value_halves, cells,
    key_row, key_head, value_row, value_head, most,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Grid: rows x (keys, values), or rows x 1 for keys alone."""
    row = tl.program_id(0).to(tl.int64)
    cell = tl.load(cells + row)
    if tl.program_id(1) == 0:
        _write_row(
            keys, stored_keys, key_halves, row, cell, key_row, key_head, most,
            HEADS, KEY_DIM, BLOCK, AT_ONCE,
        )  # fmt: skip
    else:
        _write_row(
            values, stored_values, value_halves, row, cell, value_row, value_head, most,
            HEADS, VALUE_DIM, BLOCK, AT_ONCE,
        )  # fmt: skip


def write_cache(
    keys: Tensor, values: Tensor | None, pages: LayerPages, plan: AttentionPlan
) -> None:
    """As `runtime.kernels.attention.write_cache`."""
    keys, parts = with_adjacent_elements(keys), len(pages.stored)
    values = keys if values is None else with_adjacent_elements(values)
    launch(
        write_kernel, (keys.shape[0], parts), keys, values, *kernel_pages(pages), plan.write_cell,
        *keys.stride()[:2], *values.stride()[:2], RANGES.get(pages.type, float("inf")),
        HEADS=pages.keys.shape[2], KEY_DIM=pages.dims[0], VALUE_DIM=pages.dims[1],
        BLOCK=BLOCK_BYTES[pages.type], AT_ONCE=ELEMENTS, device=keys.device,
    )  # fmt: skip
