"""Token masks of sequences with a grammar, computed on a thread beside the device's step."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.engine.request import DrawFailure, Matcher
from runtime.engine.scheduler import Chunk
from runtime.errors import GenerationFailedError
from runtime.worker.pinned_buffer import ALIGNMENT, PinnedBuffer
from runtime.worker.sampler import TokenMasks

_BITS = 32
_WORD_BYTES, _ROW_BYTES = 4, 8

# By the index of a drawn row: why its mask is missing.
Failures = dict[int, DrawFailure]


class _Table:
    """Rows and words of the masks of one step, on the host and on the device."""

    def __init__(self, slots: int, words: int, device: torch.device) -> None:
        nbytes, device_bytes = buffer_bytes(slots=slots, vocab_size=_BITS * words), None
        if device.type == "cuda":
            device_bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._buffer = PinnedBuffer(nbytes, device_bytes)
        self._rows, rows = self._buffer.take(slots, torch.int64)
        host, device_words = self._buffer.take(slots * words, torch.int32)
        self._words: NDArray[np.int32] = host.reshape(slots, words)
        self._masks = rows, device_words.view(slots, words)

    def fill(self, rows: list[int]) -> NDArray[np.int32]:
        """The words of the masks of these rows, to be written."""
        self._buffer.wait()
        self._rows[: len(rows)] = rows
        return self._words[: len(rows)]

    def uploaded(self, count: int) -> TokenMasks:
        self._buffer.upload(self._rows.nbytes + count * self._words[0].nbytes)
        return TokenMasks(*self._masks, count)


@dataclass(frozen=True, slots=True)
class PendingMasks:
    """The masks of one step while they are computed."""

    _table: _Table
    _count: int
    _work: Future[Failures]

    def uploaded(self) -> tuple[TokenMasks, Failures]:
        """Waits for the computation. A row that has failed may draw any token."""
        failures = self._work.result()
        return self._table.uploaded(self._count), failures


class MaskWorker:
    """Computes masks for rows of steps in two host buffers in turn, like `InputPreparer`."""

    def __init__(self, *, slots: int, vocab_size: int, device: torch.device) -> None:
        words = -(-vocab_size // _BITS)
        self._tables = [_Table(slots, words, device) for _ in range(2)]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def begin(self, drawn: Sequence[Chunk]) -> PendingMasks | None:
        """Starts computing the masks of the drawn rows whose sequences have a grammar."""
        found = [(row, chunk.sequence.matcher) for row, chunk in enumerate(drawn)]
        matchers = {row: matcher for row, matcher in found if matcher is not None}
        if not matchers:
            return None
        self._tables.reverse()
        table, count = self._tables[0], len(matchers)
        work = self._thread.submit(_compute, matchers, table.fill(list(matchers)))
        return PendingMasks(table, count, work)


def buffer_bytes(*, slots: int, vocab_size: int) -> int:
    """Bytes of the masks of all slots."""
    return slots * (_ROW_BYTES + _WORD_BYTES * -(-vocab_size // _BITS)) + 2 * ALIGNMENT


def _compute(matchers: dict[int, Matcher], words: NDArray[np.int32]) -> Failures:
    failures = {}
    for (row, matcher), mask in zip(matchers.items(), words, strict=True):
        mask[:] = 0
        try:
            matcher.allowed(mask.data)
        except GenerationFailedError as error:
            failures[row] = DrawFailure(str(error))
            mask[:] = -1
    return failures
