"""Rows of the sequences of a step, for kernels of recurrent layers on CUDA devices."""

import triton
import triton.language as tl

from runtime.worker.model import AttentionPlan, RowForm


def counted_spans(plan: AttentionPlan, rows: int) -> tuple[int, int]:
    """The number of spans, and the rows of the longest."""
    if plan.form is RowForm.ONE_EACH:
        return rows, 1
    return len(plan.spans), max(span.end - span.begin for span in plan.spans)


@triton.jit
def span_of_rows(row_slot, rows, SINGLE: tl.constexpr):
    """[begin, end) of the rows of span program_id(0)."""
    number = tl.program_id(0)
    begin, end = number, number + 1
    if not SINGLE:
        begin, end, before = rows * 0, rows, rows * 0
        for start in range(0, rows, 1024):
            row = start + tl.arange(0, 1024)
            slot = tl.load(row_slot + row, mask=row < rows, other=-1)
            earlier = tl.load(row_slot + row - 1, mask=(row < rows) & (row > 0), other=-1)
            begins = ((slot != earlier) & (row < rows)).to(tl.int32)
            order = before + tl.cumsum(begins, 0)
            begin += tl.sum(tl.where((begins > 0) & (order == number + 1), row, 0), 0)
            end = tl.minimum(end, tl.min(tl.where((begins > 0) & (order == number + 2), row, rows)))
            before += tl.sum(begins, 0)
    return begin, end
