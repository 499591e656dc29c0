"""The recurrence of RWKV 7 on CUDA devices; a sequence continues where `visible_end` is not 0.

The bits of a row depend neither on other sequences nor on how its own is divided into steps.
"""

import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.triton.curves import sigmoid
from runtime.kernels.triton.launch import divided, launch, next_power, with_adjacent_elements
from runtime.kernels.triton.sequence_states import counted_spans, span_of_rows
from runtime.kernels.wkv import LEAST_LENGTH, LEAST_LOG, WkvHeads, WkvRows
from runtime.worker.model import AttentionPlan, LayerPages

# Value columns of a state that a program updates.
COLUMNS = 16


@triton.jit
def _of_keys(x, row, row_stride, place, exists):
    return tl.load(x + row * row_stride + place, mask=exists, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def wkv7_kernel(
    queries, decays, keys, values, rates, removed, added, own_factors, states, row_slot, ends,
    cells, answers, own, rows,
    query_stride, decay_stride, key_stride, value_stride, rate_stride, least_log, least_length,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr,
    SINGLE: tl.constexpr,
):  # fmt: skip
    """Grid: spans x heads x COLUMNS value columns. Rows are computed in order."""
    begin, end = span_of_rows(row_slot, rows, SINGLE)
    head = tl.program_id(1)
    key, column = tl.arange(0, PADDED), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_column = key < SIZE, column < SIZE
    both, place = is_key[:, None] & is_column[None, :], head * SIZE + key
    page = tl.load(cells + begin).to(tl.int64)
    at = states + (page * HEADS + head) * (SIZE * SIZE) + key[:, None] * SIZE + column[None, :]
    state = tl.load(at, mask=both & (tl.load(ends + begin) > 0), other=0.0)
    remove = tl.load(removed + place, mask=is_key, other=0.0)
    add = tl.load(added + place, mask=is_key, other=0.0)
    factor = tl.load(own_factors + place, mask=is_key, other=0.0)
    row = begin.to(tl.int64)
    for _ in range(begin, end):
        query = _of_keys(queries, row, query_stride, place, is_key)
        rate = sigmoid(_of_keys(rates, row, rate_stride, place, is_key))
        kept = tl.exp(least_log * sigmoid(_of_keys(decays, row, decay_stride, place, is_key)))
        stored = _of_keys(keys, row, key_stride, place, is_key)
        unit = stored * remove
        unit = unit / tl.maximum(tl.sqrt(tl.sum(unit * unit, 0)), least_length)
        stored = stored * (1.0 + (rate - 1.0) * add)
        source = values + row * value_stride + head * SIZE + column
        value = tl.load(source, mask=is_column, other=0.0).to(tl.float32)
        known = tl.sum(state * unit[:, None], 0)
        state = state * kept[:, None] - (rate * unit)[:, None] * known[None, :]
        state += stored[:, None] * value[None, :]
        answer = tl.sum(state * query[:, None], 0)
        part = tl.sum(query * factor * stored, 0) * value
        to = (row * HEADS + head) * SIZE + column
        tl.store(answers + to, answer.to(answers.dtype.element_ty), mask=is_column)
        tl.store(own + to, part.to(own.dtype.element_ty), mask=is_column)
        row += 1
    tl.store(at, state, mask=both)


def wkv7(
    rows: WkvRows, heads: WkvHeads, pages: LayerPages, plan: AttentionPlan
) -> tuple[Tensor, Tensor]:
    """As `runtime.kernels.wkv.wkv7`."""
    parts = [
        with_adjacent_elements(part)
        for part in (rows.queries, rows.decays, rows.keys, rows.values, rows.rates)
    ]
    values, (_, count, size, _) = parts[3], pages.values.shape
    answers, own = (values.new_empty(len(values), count, size) for _ in range(2))
    spans, _ = counted_spans(plan, len(values))
    launch(
        wkv7_kernel, (spans, count, divided(size, COLUMNS)),
        *parts, heads.removed, heads.added, heads.own, pages.values, plan.row_slot,
        plan.visible_end, plan.write_cell, answers, own, len(values),
        *(part.stride(0) for part in parts), LEAST_LOG, LEAST_LENGTH,
        HEADS=count, SIZE=size, PADDED=next_power(size), COLUMNS=COLUMNS,
        SINGLE=spans == len(values), num_warps=1, device=values.device,
    )  # fmt: skip
    return answers, own
