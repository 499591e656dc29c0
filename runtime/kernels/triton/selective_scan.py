"""Selective scans on CUDA devices; a sequence continues where `visible_end` is not 0.

The bits of a row depend neither on other sequences nor on how its own is divided into steps.
"""

import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.selective_scan import Channels, ScanRows
from runtime.kernels.triton.curves import softplus
from runtime.kernels.triton.launch import divided, launch, next_power, with_adjacent_elements
from runtime.kernels.triton.sequence_states import counted_spans, span_of_rows
from runtime.worker.model import AttentionPlan, LayerPages

# Channels that a program computes.
CHANNELS = 16


@triton.jit(do_not_specialize=["rows"])
def selective_scan_kernel(
    values, steps, keys, queries, rates, offsets, skips, states, row_slot, ends, cells, result,
    rows, value_stride, step_stride, key_stride, query_stride,
    COUNT: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, CHANNELS: tl.constexpr,
    SINGLE: tl.constexpr,
):  # fmt: skip
    """Grid: spans x CHANNELS channels. Rows are computed in order."""
    begin, end = span_of_rows(row_slot, rows, SINGLE)
    channel, element = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, PADDED)
    is_channel, is_element = channel < COUNT, element < SIZE
    both = is_channel[:, None] & is_element[None, :]
    place = channel[:, None] * SIZE + element[None, :]
    page = tl.load(cells + begin).to(tl.int64)
    at = states + page * (COUNT * SIZE) + place
    state = tl.load(at, mask=both & (tl.load(ends + begin) > 0), other=0.0)
    rate = tl.load(rates + place, mask=both, other=0.0)
    offset = tl.load(offsets + channel, mask=is_channel, other=0.0)
    skip = tl.load(skips + channel, mask=is_channel, other=0.0)
    row = begin.to(tl.int64)
    for _ in range(begin, end):
        value = tl.load(values + row * value_stride + channel, mask=is_channel, other=0.0)
        time = tl.load(steps + row * step_stride + channel, mask=is_channel, other=0.0)
        key = tl.load(keys + row * key_stride + element, mask=is_element, other=0.0)
        query = tl.load(queries + row * query_stride + element, mask=is_element, other=0.0)
        value, step = value.to(tl.float32), softplus(time.to(tl.float32) + offset)
        learnt = (step * value)[:, None] * key.to(tl.float32)[None, :]
        state = state * tl.exp(rate * step[:, None]) + learnt
        answer = tl.sum(state * query.to(tl.float32)[None, :], 1) + skip * value
        tl.store(
            result + row * COUNT + channel, answer.to(result.dtype.element_ty), mask=is_channel
        )
        row += 1
    tl.store(at, state, mask=both)


def selective_scan(
    rows: ScanRows, channels: Channels, pages: LayerPages, plan: AttentionPlan
) -> Tensor:
    """As `runtime.kernels.selective_scan.selective_scan`."""
    parts = [
        with_adjacent_elements(part) for part in (rows.values, rows.steps, rows.keys, rows.queries)
    ]
    values, (_, count, size, _) = parts[0], pages.values.shape
    result = values.new_empty(len(values), count)
    spans, _ = counted_spans(plan, len(values))
    launch(
        selective_scan_kernel, (spans, divided(count, CHANNELS)),
        *parts, channels.rates, channels.offsets, channels.skips, pages.values, plan.row_slot,
        plan.visible_end, plan.write_cell, result, len(values),
        *(part.stride(0) for part in parts),
        COUNT=count, SIZE=size, PADDED=next_power(size), CHANNELS=CHANNELS,
        SINGLE=spans == len(values), num_warps=1, device=values.device,
    )  # fmt: skip
    return result
