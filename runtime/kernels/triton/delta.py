"""Recurrent layers on CUDA devices; a sequence continues where `visible_end` is not 0.

The bits of a row depend neither on other sequences nor on how its own is divided into steps.
"""

import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.delta import NORM_EPS, DeltaGates
from runtime.kernels.triton.curves import sigmoid, softplus
from runtime.kernels.triton.launch import divided, launch, next_power, with_adjacent_elements
from runtime.kernels.triton.sequence_states import counted_spans, span_of_rows
from runtime.worker.model import AttentionPlan, LayerPages

# Value columns of a state that a program of `delta_kernel` updates; channels and rows of a program
# of `convolution_kernel`.
COLUMNS, CHANNELS, ROWS = 16, 128, 64


@triton.jit
def _input(x, state, row, begin, continues, channel, exists, row_stride, n, TAPS: tl.constexpr):
    """The input of a row or, before the first row of the span, the one in the state."""
    here = tl.load(x + row * row_stride + channel, mask=exists & (row >= begin), other=0.0)
    kept = tl.load(
        state + (row - begin + TAPS) * n + channel, mask=exists & (row < begin) & continues,
        other=0.0,
    )  # fmt: skip
    return tl.where(row >= begin, here.to(tl.float32), kept)


@triton.jit(do_not_specialize=["rows"])
def convolution_kernel(
    x, weight, bias, states, row_slot, ends, cells, result, rows, row_stride, n,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, SINGLE: tl.constexpr,
    CURVED: tl.constexpr,
):  # fmt: skip
    """Grid: spans x blocks of CHANNELS x blocks of ROWS; the first block of rows updates the
    state. The results are silu of the sums if CURVED."""
    begin, end = span_of_rows(row_slot, rows, SINGLE)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < n
    continues = tl.load(ends + begin) > 0
    state = states + tl.load(cells + begin).to(tl.int64) * TAPS * n
    first = begin + tl.program_id(2) * ROWS
    row = first.to(tl.int64)
    for _ in range(first, tl.minimum(first + ROWS, end)):
        total = tl.zeros((CHANNELS,), tl.float32)
        if bias is not None:
            total += tl.load(bias + channel, mask=exists, other=0.0)
        for tap in tl.static_range(TAPS + 1):
            factor = tl.load(weight + tap * n + channel, mask=exists, other=0.0)
            total += factor * _input(
                x, state, row - TAPS + tap, begin, continues, channel, exists, row_stride, n, TAPS
            )
        if CURVED:
            total = total * sigmoid(total)
        tl.store(result + row * n + channel, total.to(result.dtype.element_ty), mask=exists)
        row += 1
    if tl.program_id(2) == 0:
        last = end.to(tl.int64)
        for tap in tl.static_range(TAPS):  # a later input of the state, or of this step
            kept = _input(
                x, state, last - TAPS + tap, begin, continues, channel, exists, row_stride, n, TAPS
            )
            tl.store(state + tap * n + channel, kept, mask=exists)


@triton.jit
def _unit(x, eps):
    """x [n] of length 1."""
    return x * tl.math.rsqrt(tl.sum(x * x, 0) + eps)


@triton.jit(do_not_specialize=["rows"])
def delta_kernel(
    mixed, alphas, betas, rates, offsets, states, row_slot, ends, cells, result,
    rows, row_stride, alpha_stride, beta_stride, query_scale, eps,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEYS_PADDED: tl.constexpr, COLUMNS: tl.constexpr, DECAYS: tl.constexpr, TILED: tl.constexpr,
    SINGLE: tl.constexpr,
):  # fmt: skip
    """Grid: spans x heads x COLUMNS value columns. Rows are computed in order. DECAYS: of a head, 1
    or KEY_DIM."""
    begin, end = span_of_rows(row_slot, rows, SINGLE)
    head = tl.program_id(1)
    key_head = head % KEY_HEADS if TILED else head // (HEADS // KEY_HEADS)
    key, column = tl.arange(0, KEYS_PADDED), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_column = key < KEY_DIM, column < VALUE_DIM
    both = is_key[:, None] & is_column[None, :]
    page = tl.load(cells + begin).to(tl.int64)
    at = states + (page * HEADS + head) * (KEY_DIM * VALUE_DIM)
    at += key[:, None] * VALUE_DIM + column[None, :]
    state = tl.load(at, mask=both & (tl.load(ends + begin) > 0), other=0.0)
    rate = tl.load(rates + head)
    if DECAYS > 1:
        offset = tl.load(offsets + head * DECAYS + key, mask=is_key, other=0.0)
    else:
        offset = tl.load(offsets + head)
    row = begin.to(tl.int64)
    for _ in range(begin, end):
        source = mixed + row * row_stride + key_head * KEY_DIM + key
        query = tl.load(source, mask=is_key, other=0.0).to(tl.float32)
        keys = tl.load(source + KEY_HEADS * KEY_DIM, mask=is_key, other=0.0).to(tl.float32)
        source = mixed + row * row_stride + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
        value = tl.load(source, mask=is_column, other=0.0).to(tl.float32)
        beta = sigmoid(tl.load(betas + row * beta_stride + head).to(tl.float32))
        query, keys = _unit(query, eps) * query_scale, _unit(keys, eps)
        source = alphas + row * alpha_stride + head * DECAYS
        if DECAYS > 1:
            alpha = tl.load(source + key, mask=is_key, other=0.0).to(tl.float32)
            state = state * tl.exp(rate * softplus(alpha + offset))[:, None]
        else:
            state = state * tl.exp(rate * softplus(tl.load(source).to(tl.float32) + offset))
        update = beta * (value - tl.sum(state * keys[:, None], 0))
        state += keys[:, None] * update[None, :]
        answer = tl.sum(state * query[:, None], 0).to(result.dtype.element_ty)
        tl.store(result + (row * HEADS + head) * VALUE_DIM + column, answer, mask=is_column)
        row += 1
    tl.store(at, state, mask=both)


def short_convolution(
    x: Tensor,
    weight: Tensor,
    pages: LayerPages,
    plan: AttentionPlan,
    *,
    bias: Tensor | None = None,
    curved: bool = True,
) -> Tensor:
    """As `runtime.kernels.delta.short_convolution`."""
    x = with_adjacent_elements(x)
    result, (rows, n) = x.new_empty(x.shape), x.shape
    spans, longest = counted_spans(plan, rows)
    launch(
        convolution_kernel, (spans, divided(n, CHANNELS), divided(longest, ROWS)),
        x, weight, bias, pages.keys, plan.row_slot, plan.visible_end, plan.write_cell, result,
        rows, x.stride(0), n, TAPS=weight.shape[0] - 1, CHANNELS=CHANNELS, ROWS=ROWS,
        SINGLE=spans == rows, CURVED=curved, device=x.device,
    )  # fmt: skip
    return result


def gated_delta(
    mixed: Tensor,
    gates: DeltaGates,
    pages: LayerPages,
    plan: AttentionPlan,
    *,
    key_heads: int,
    tiled: bool,
) -> Tensor:
    """As `runtime.kernels.delta.gated_delta`."""
    mixed, alphas, betas = map(with_adjacent_elements, (mixed, gates.alphas, gates.betas))
    _, heads, key_dim, value_dim = pages.values.shape
    result = mixed.new_empty(len(mixed), heads, value_dim)
    spans, _ = counted_spans(plan, len(mixed))
    launch(
        delta_kernel, (spans, heads, divided(value_dim, COLUMNS)),
        mixed, alphas, betas, gates.rates, gates.offsets, pages.values, plan.row_slot,
        plan.visible_end, plan.write_cell, result,
        len(mixed), mixed.stride(0), alphas.stride(0), betas.stride(0), key_dim**-0.5, NORM_EPS,
        HEADS=heads, KEY_HEADS=key_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        KEYS_PADDED=next_power(key_dim), COLUMNS=COLUMNS, DECAYS=gates.decays, TILED=tiled,
        SINGLE=spans == len(mixed), num_warps=1, device=mixed.device,
    )  # fmt: skip
    return result
