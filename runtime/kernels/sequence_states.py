"""Steps of recurrent layers: spans for C kernels, and for torch twins the states and decays."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.kernels.attention import by_length, span_rows
from runtime.kernels.native import address
from runtime.worker.model import AttentionPlan, RowForm, RowSpan

# Rows that the twins compute at once.
CHUNK = 64


@dataclass(frozen=True, slots=True, eq=False)
class StepSpans:
    """A plan's spans as arguments of the C kernels: their number, rows [2, spans] int32 or None if
    each is one row, whether they continue a state [spans] int32, and pages [spans] int64."""

    count: int
    rows: Tensor | None
    continues: Tensor
    pages: Tensor

    @classmethod
    def of(cls, plan: AttentionPlan, tokens: int) -> "StepSpans":
        """ValueError for a span beyond the `tokens` of the batch."""
        if plan.form is RowForm.ONE_EACH:
            return cls(tokens, None, plan.visible_end, plan.write_cell)
        if any(not 0 <= span.begin <= span.end <= tokens for span in plan.spans):
            raise ValueError(f"the plan has rows beyond the {tokens:,} of the batch")
        numbers = [[s.begin for s in plan.spans], [s.end for s in plan.spans]]
        rows = torch.tensor(numbers, dtype=torch.int32)
        starts = torch.tensor([s.start for s in plan.spans], dtype=torch.int32)
        return cls(len(plan.spans), rows, starts, plan.write_cell[rows[0].long()])

    @property
    def addresses(self) -> tuple[int | None, ...]:
        count = (self.count,)
        begins, ends = (None, None) if self.rows is None else self.rows.unbind()
        return (
            None if begins is None else address(begins, count, torch.int32),
            None if ends is None else address(ends, count, torch.int32),
            address(self.continues, count, torch.int32),
            address(self.pages, count, torch.int64),
        )


class States:
    """The states of some spans; `rows` [spans, rows] are their rows in the batch."""

    def __init__(self, stored: Tensor, plan: AttentionPlan, rows: Tensor) -> None:
        self._stored, self._pages = stored, plan.write_cell[rows[:, 0]]

    def initial(self, spans: list[RowSpan]) -> Tensor:
        """The stored states, or zeros at the start of a sequence."""
        states = self._stored.index_select(0, self._pages)
        for number, span in enumerate(spans):
            if span.start == 0:
                states[number] = 0.0
        return states

    def store(self, states: Tensor) -> None:
        self._stored.index_copy_(0, self._pages, states)


def groups_of_spans(
    spans: tuple[RowSpan, ...], device: torch.device, *, at_once: int = 1 << 30
) -> Iterator[tuple[list[RowSpan], Tensor]]:
    """Groups of at most `at_once` spans of one length, with their rows int64 [spans, rows]."""
    for members, length in by_length(spans):
        for first in range(0, len(members), at_once):
            some = members[first : first + at_once]
            yield some, span_rows(some, 0, length, device)


@dataclass(frozen=True, slots=True, eq=False)
class Decays:
    """How much is left of earlier rows and of the state before some rows; float32.

    between [spans, heads, rows, rows]: of the update of row j at row i, 0 if it is a later row.
    fade [spans, heads, rows, 1]: of the state at row i. kept, likewise: of the update of row j
    after the last row.
    """

    between: Tensor
    fade: Tensor
    kept: Tensor

    @classmethod
    def of(cls, logarithms: Tensor) -> "Decays":
        """logarithms [spans, heads, rows]: of the decay at each row."""
        exact = logarithms.double().cumsum(dim=2)  # differences of large sums
        between = (exact.unsqueeze(3) - exact.unsqueeze(2)).float()
        later = torch.ones(between.shape[2:], dtype=torch.bool, device=between.device).triu(1)
        between = between.masked_fill_(later, -torch.inf).exp_()
        kept = (exact[:, :, -1:] - exact).float().exp().unsqueeze(3)
        return cls(between, exact.float().exp().unsqueeze(3), kept)
