"""Pools the hidden states of a prompt, from one or several steps, into one vector."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.engine.request import Pooling
from runtime.engine.step_plan import Chunk
from runtime.worker.model import RowSpan


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Rows [begin, end) of a step's states belong to the prompt in `slot`.

    `first`: they are its first ones. `divisor`: the number of rows that the vector is the mean of,
    if these are the last ones; None if more follow.
    """

    slot: int
    begin: int
    end: int
    first: bool
    divisor: int | None


@dataclass(frozen=True, slots=True)
class PooledStep:
    """The pooled rows of a step: the batch rows, in the order of their states; the parts that they
    form; and the index of the chunk of each completed vector."""

    rows: tuple[int, ...]
    parts: tuple[PooledRows, ...]
    chunks: tuple[int, ...]


def plan_pooling(chunks: Sequence[Chunk], spans: Sequence[RowSpan]) -> PooledStep:
    """`spans`: the rows of each chunk."""
    rows: list[int] = []
    parts, complete = [], []
    for index, (chunk, span) in enumerate(zip(chunks, spans, strict=True)):
        request = chunk.sequence.request
        if request.pooling is None:
            continue
        length, end = len(request.prompt), chunk.start + chunk.length
        wanted = pooled_positions(request.pooling, chunk.start, end, length)
        begin = len(rows)
        rows += [span.begin + position - chunk.start for position in wanted]
        divisor = None
        if end == length:
            divisor = length if request.pooling is Pooling.MEAN else 1
            complete.append(index)
        parts.append(PooledRows(chunk.slot, begin, len(rows), chunk.start == 0, divisor))
    return PooledStep(tuple(rows), tuple(parts), tuple(complete))


def pooled_positions(pooling: Pooling, begin: int, end: int, length: int) -> range:
    """The positions in [begin, end) that are pooled for a prompt of `length` tokens."""
    match pooling:
        case Pooling.MEAN:
            return range(begin, end)
        case Pooling.CLS:
            return range(begin, min(end, max(begin, 1)))
        case Pooling.LAST:
            return range(min(end, max(begin, length - 1)), end)


# Rows are rounded to multiples of this before they are added. Float64 adds up to 2**53 multiples
# exactly, so a sum depends neither on how a text is divided into steps nor on the order of
# addition.
_UNIT = 2.0**-30


class Pooler:
    """Sums of hidden states, one per slot, as float64 multiples of `_UNIT`."""

    def __init__(self, *, slots: int, hidden: int, device: torch.device) -> None:
        self._sums = torch.zeros(slots, hidden, dtype=torch.float64, device=device)

    @staticmethod
    def state_bytes(*, slots: int, hidden: int) -> int:
        """Memory of the sums."""
        return 8 * slots * hidden

    def take(self, states: Tensor, parts: Sequence[PooledRows]) -> Tensor | None:
        """states [rows, hidden] -> float32 [n, hidden]: a vector for each part with a divisor; None
        if there are none."""
        vectors = []
        for part in parts:
            total = (states[part.begin : part.end].double() / _UNIT).round_().sum(dim=0)
            if not part.first:
                total += self._sums[part.slot]
            if part.divisor is None:
                self._sums[part.slot] = total
            else:
                vectors.append((total * (_UNIT / part.divisor)).float())
        return torch.stack(vectors) if vectors else None
