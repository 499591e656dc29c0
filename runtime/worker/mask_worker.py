"""Token masks of sequences with a grammar, computed on a thread beside the device's step."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class PendingMasks:
    """The masks of one step while they are computed."""

    masks: TokenMasks
    _buffer: PinnedBuffer
    _work: Future[Failures]

    def uploaded(self) -> tuple[TokenMasks, Failures]:
        """Waits for the computation. A row that has failed may draw any token."""
        failures = self._work.result()
        self._buffer.upload()
        return self.masks, failures


class MaskWorker:
    """Computes masks for rows of steps in two host buffers in turn, like `InputPreparer`."""

    def __init__(self, *, slots: int, vocab_size: int, device: torch.device) -> None:
        self._words = -(-vocab_size // _BITS)
        nbytes, device_bytes = buffer_bytes(slots=slots, vocab_size=vocab_size), None
        if device.type == "cuda":
            device_bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._buffers = [PinnedBuffer(nbytes, device_bytes) for _ in range(2)]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def begin(self, drawn: Sequence[Chunk]) -> PendingMasks | None:
        """Starts computing the masks of the drawn rows whose sequences have a grammar."""
        found = [(row, chunk.sequence.matcher) for row, chunk in enumerate(drawn)]
        matchers = {row: matcher for row, matcher in found if matcher is not None}
        if not matchers:
            return None
        self._buffers.reverse()
        buffer = self._buffers[0]
        buffer.clear()
        rows = buffer.put(list(matchers), torch.int64)
        host, words = buffer.take(len(matchers) * self._words, torch.int32)
        shape = (len(matchers), self._words)
        work = self._thread.submit(_compute, matchers, host.reshape(shape))
        return PendingMasks(TokenMasks(rows, words.view(shape), len(matchers)), buffer, work)


def buffer_bytes(*, slots: int, vocab_size: int) -> int:
    """Bytes of the masks of all slots."""
    return slots * (_ROW_BYTES + _WORD_BYTES * -(-vocab_size // _BITS)) + 2 * ALIGNMENT


def _compute(matchers: dict[int, Matcher], words: NDArray[Any]) -> Failures:
    failures = {}
    for (row, matcher), mask in zip(matchers.items(), words, strict=True):
        mask[:] = 0
        try:
            matcher.allowed(mask.data)
        except GenerationFailedError as error:
            failures[row] = DrawFailure(str(error))
            mask[:] = -1
    return failures
