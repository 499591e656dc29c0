"""State spaces on CUDA devices; a sequence continues where `visible_end` is not 0.

The bits of a row depend neither on other sequences nor on how its own is divided into steps.
"""

import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.state_space import StateSpace
from runtime.kernels.triton.curves import softplus
from runtime.kernels.triton.launch import divided, launch, next_power, with_adjacent_elements
from runtime.kernels.triton.sequence_states import counted_spans, span_of_rows
from runtime.worker.model import AttentionPlan, LayerPages

# Columns of a state that a program updates.
COLUMNS = 16


@triton.jit(do_not_specialize=["rows"])
def state_space_kernel(
    mixed, steps, rates, offsets, skips, states, row_slot, ends, cells, result,
    rows, row_stride, step_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEYS_PADDED: tl.constexpr, COLUMNS: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Grid: spans x heads x COLUMNS value columns. Rows are computed in order."""
    begin, end = span_of_rows(row_slot, rows, SINGLE)
    head = tl.program_id(1)
    key, column = tl.arange(0, KEYS_PADDED), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_column = key < KEY_DIM, column < VALUE_DIM
    both = is_key[:, None] & is_column[None, :]
    page = tl.load(cells + begin).to(tl.int64)
    at = states + (page * HEADS + head) * (KEY_DIM * VALUE_DIM)
    at += key[:, None] * VALUE_DIM + column[None, :]
    state = tl.load(at, mask=both & (tl.load(ends + begin) > 0), other=0.0)
    rate, offset, skip = tl.load(rates + head), tl.load(offsets + head), tl.load(skips + head)
    row = begin.to(tl.int64)
    for _ in range(begin, end):
        source = mixed + row * row_stride
        value = tl.load(source + head * VALUE_DIM + column, mask=is_column, other=0.0)
        source += HEADS * VALUE_DIM + head // (HEADS // GROUPS) * KEY_DIM + key
        keys = tl.load(source, mask=is_key, other=0.0).to(tl.float32)
        query = tl.load(source + GROUPS * KEY_DIM, mask=is_key, other=0.0).to(tl.float32)
        value = value.to(tl.float32)
        step = softplus(tl.load(steps + row * step_stride + head).to(tl.float32) + offset)
        state = state * tl.exp(rate * step) + keys[:, None] * (step * value)[None, :]
        answer = tl.sum(state * query[:, None], 0) + skip * value
        target = result + (row * HEADS + head) * VALUE_DIM + column
        tl.store(target, answer.to(result.dtype.element_ty), mask=is_column)
        row += 1
    tl.store(at, state, mask=both)


def state_space(
    mixed: Tensor,
    steps: Tensor,
    space: StateSpace,
    pages: LayerPages,
    plan: AttentionPlan,
    *,
    groups: int,
) -> Tensor:
    """As `runtime.kernels.state_space.state_space`."""
    mixed, steps = map(with_adjacent_elements, (mixed, steps))
    _, heads, key_dim, value_dim = pages.values.shape
    result = mixed.new_empty(len(mixed), heads, value_dim)
    spans, _ = counted_spans(plan, len(mixed))
    launch(
        state_space_kernel, (spans, heads, divided(value_dim, COLUMNS)),
        mixed, steps, space.rates, space.offsets, space.skips, pages.values, plan.row_slot,
        plan.visible_end, plan.write_cell, result, len(mixed), mixed.stride(0), steps.stride(0),
        HEADS=heads, GROUPS=groups, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        KEYS_PADDED=next_power(key_dim), COLUMNS=COLUMNS, SINGLE=spans == len(mixed), num_warps=1,
        device=mixed.device,
    )  # fmt: skip
    return result
