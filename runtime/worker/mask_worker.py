"""Token masks of sequences with a grammar, computed on threads beside the device's step."""

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.engine.request import DrawFailure, LateMask, Matcher
from runtime.engine.step_plan import Chunk
from runtime.errors import GenerationFailedError
from runtime.worker.pinned_buffer import ALIGNMENT, PinnedBuffer
from runtime.worker.sampler import TokenMasks

# How long a step with computed logits waits for late masks if it has other rows.
PATIENCE_S = 0.005
# One thread computes the masks in turn; when one is late, another thread continues.
_THREADS = 4
_BITS = 32
_WORD_BYTES, _ROW_BYTES = 4, 8

# By index of a sampling row without a mask: the reason. Such a row has sampled any token.
Unmasked = dict[int, DrawFailure | LateMask]


@dataclass(eq=False, slots=True)
class _Masks:
    """The words [1 + proposed, words] of a sequence's masks: for its next token, and after each of
    its proposed tokens. They are valid when `work` is done, whose result is None, or the reason why
    they are missing."""

    matcher: Matcher
    words: NDArray[np.int32]
    proposed: list[int]
    work: Future[DrawFailure | None] = field(default_factory=Future)

    def compute(self) -> None:
        try:
            first, *others = (words.data for words in self.words)
            self.matcher.allowed(first)
            if others:
                self.matcher.look_ahead(self.proposed, others)
            self.work.set_result(None)
        except GenerationFailedError as error:
            self.work.set_result(DrawFailure(str(error)))
        except BaseException as error:
            self.work.set_exception(error)

    def missing(self) -> DrawFailure | LateMask | None:
        done = self.work.done
        return self.work.result() if done() else LateMask(done, self)


class _Table:
    """Rows and words of the masks of one step, on the host and on the device."""

    def __init__(self, rows: int, words: int, device: torch.device) -> None:
        nbytes, device_bytes = buffer_bytes(rows=rows, vocab_size=_BITS * words), None
        if device.type == "cuda":
            device_bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._buffer = PinnedBuffer(nbytes, device_bytes)
        self._rows, device_rows = self._buffer.take(rows, torch.int64)
        self._words_begin = self._buffer.used
        host, device_words = self._buffer.take(rows * words, torch.int32)
        self._words: NDArray[np.int32] = host.reshape(rows, words)
        self._masks = device_rows, device_words.view(rows, words)

    def uploaded(self, masks: dict[int, NDArray[np.int32]]) -> TokenMasks:
        """The masks of some rows."""
        self._buffer.wait()
        self._rows[: len(masks)] = list(masks)
        for row, words in zip(self._words, masks.values(), strict=False):
            row[:] = words
        self._buffer.upload(self._words_begin + len(masks) * self._words[0].nbytes)
        return TokenMasks(*self._masks, len(masks))


@dataclass(frozen=True, slots=True)
class PendingMasks:
    """The masks of one step while they are computed. By index of a sampling row: the masks of its
    sequence, and the row's number among them."""

    _masks: dict[int, tuple[_Masks, int]]
    _worker: "MaskWorker"
    _step_chunks: int

    def uploaded(self) -> tuple[TokenMasks, Unmasked]:
        """Waits as `MaskWorker.wait`, then uploads the masks; also returns the late and failed
        ones."""
        works = [masks.work for masks, _ in self._masks.values()]
        if not all(work.done() for work in works):
            self._worker.wait(works, alone=len(works) == self._step_chunks)
        missing = {row: masks.missing() for row, (masks, _) in self._masks.items()}
        found = {
            row: masks.words[index]
            for row, (masks, index) in self._masks.items()
            if missing[row] is None
        }
        unmasked = {row: why for row, why in missing.items() if why is not None}
        return self._worker.table().uploaded(found), unmasked


class MaskWorker:
    """Computes masks for rows of steps, and uploads them from two host buffers in turn.

    `waits`: steps wait for every mask, without a limit.
    """

    def __init__(self, *, rows: int, vocab_size: int, device: torch.device, waits: bool) -> None:
        self._words, self._waits = -(-vocab_size // _BITS), waits
        self._tables = [_Table(rows, self._words, device) for _ in range(2)]
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="masks")
        self._queue: deque[_Masks] = deque()

    def begin(self, constrained: Mapping[int, Chunk], *, step_chunks: int) -> PendingMasks | None:
        """Start computing the masks of the sampling rows whose sequences have a grammar, in order.
        `step_chunks`: number of chunks of the step."""
        masks, groups = {}, list[list[int]]()
        for row, chunk in constrained.items():
            if chunk.sequence.late_mask is not None:
                masks[row] = chunk.sequence.late_mask.mask, 0
            elif chunk.proposed:
                groups[-1].append(row)  # behind the other rows of its sequence
            else:
                groups.append([row])
        new = [self._new([constrained[row] for row in rows]) for rows in groups]
        for rows, each in zip(groups, new, strict=True):
            masks |= {row: (each, index) for index, row in enumerate(rows)}
        if new:
            self._queue.extend(new)
            self._threads.submit(self._compute)
        return PendingMasks(masks, self, step_chunks) if masks else None

    def _new(self, chunks: Sequence[Chunk]) -> _Masks:
        """The masks of a sequence. `chunks`: its last known token, then its proposed ones."""
        matcher = chunks[0].sequence.matcher
        assert matcher is not None
        proposed = [chunk.known[0] for chunk in chunks[1:]]
        return _Masks(matcher, np.zeros((len(chunks), self._words), np.int32), proposed)

    def wait(self, works: list[Future[DrawFailure | None]], *, alone: bool) -> None:
        """Wait until the masks are computed or late. `alone`: the step has only these rows, so it
        waits for at least one mask."""
        if self._waits:
            wait(works)
            return
        if alone:
            wait(works, return_when=FIRST_COMPLETED)
        wait(works, PATIENCE_S)
        if self._queue:
            self._threads.submit(self._compute)  # the masks queued behind a slow one

    def table(self) -> _Table:
        self._tables.reverse()
        return self._tables[0]

    def _compute(self) -> None:
        while True:
            try:
                mask = self._queue.popleft()
            except IndexError:  # another thread has taken the last one
                return
            mask.compute()


def buffer_bytes(*, rows: int, vocab_size: int) -> int:
    """Bytes of the masks of `rows` rows."""
    return rows * (_ROW_BYTES + _WORD_BYTES * -(-vocab_size // _BITS)) + 2 * ALIGNMENT
