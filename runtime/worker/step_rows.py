"""The rows of a step: those of its chunks, one after the other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.engine.step_plan import Chunk
from runtime.kv.cache_kinds import CacheKind
from runtime.worker.model import RowSpan

Column = NDArray[np.int64]
_COLUMNS: tuple[tuple[Callable[[Chunk], Any], type[np.generic]], ...] = (
    (attrgetter("slot"), np.int64),
    (attrgetter("start"), np.int64),
    (attrgetter("length"), np.int64),
    (attrgetter("samples"), np.bool_),
)


@dataclass(frozen=True, slots=True)
class StepRows:
    """The chunks of a step as columns [chunks]: the slot of each, its first position, its number of
    rows, whether it samples, and its rows [begins, ends)."""

    slots: Column
    starts: Column
    lengths: Column
    samples: NDArray[np.bool_]
    begins: Column
    ends: Column

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> "StepRows":
        slots, starts, lengths, samples = (
            np.fromiter(map(field, chunks), dtype, len(chunks)) for field, dtype in _COLUMNS
        )
        ends = lengths.cumsum()
        return cls(slots, starts, lengths, samples, ends - lengths, ends)

    @property
    def count(self) -> int:
        return int(self.ends[-1])

    def positions(self) -> Column:
        """[rows]."""
        return (self.starts - self.begins).repeat(self.lengths) + np.arange(self.count)

    def spans(self, *seen: NDArray[np.int32]) -> list[RowSpan]:
        """The rows of each chunk. `seen`: begin and end of the indices that these see, [chunks]."""
        columns: list[NDArray[Any]] = [self.begins, self.ends, self.slots, self.starts, *seen]
        return list(map(RowSpan, *(column.tolist() for column in columns)))


@dataclass(frozen=True, slots=True)
class SeenIndices:
    """Begin and end [rows] of the indices of a cache group that each row of a step sees."""

    begin: NDArray[np.int32]
    end: NDArray[np.int32]

    def write(
        self, kind: CacheKind, chunks: Sequence[Chunk], rows: StepRows, plain: NDArray[np.bool_]
    ) -> None:
        """`rows`: of the chunks; `plain` [chunks]: as in `SlotRequests.plain_from`."""
        alone = plain & (rows.lengths == 1)
        places = rows.begins[alone]
        self.begin[places], self.end[places] = kind.seen_by(rows.starts[alone].tolist())
        for index in (~alone).nonzero()[0].tolist():
            chunk, part = chunks[index], slice(rows.begins[index], rows.ends[index])
            stop = chunk.start + chunk.length
            self.begin[part], self.end[part] = kind.seen(chunk.start, stop, chunk.sequence.spans)

    def spans(self, rows: StepRows) -> tuple[RowSpan, ...]:
        """As in `AttentionPlan`."""
        first = np.minimum.reduceat(self.begin, rows.begins)
        last = np.maximum.reduceat(self.end, rows.begins)
        return tuple(rows.spans(first, last))
