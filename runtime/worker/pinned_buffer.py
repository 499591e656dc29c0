"""One host buffer of 32-bit words, filled from front to back and uploaded in one copy."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class PinnedBuffer:
    """Pinned for CUDA; on the CPU the buffer itself is what an upload gives."""

    def __init__(self, words: int, device: torch.device) -> None:
        self._words = torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.array: NDArray[np.int32] = self._words.numpy()
        self._used = 0
        self._uploaded: torch.cuda.Event | None = None

    def clear(self) -> None:
        """Start again at the front. Waits if the last upload is still under way."""
        if self._uploaded is not None:
            self._uploaded.synchronize()
        self._used = 0

    def take(self, count: int) -> slice:
        part = slice(self._used, self._used + count)
        assert part.stop <= len(self.array), "the plan is larger than any plan may be"
        self._used = part.stop
        return part

    def put(self, values: Sequence[int] | NDArray[np.int32], *, aligned: bool = False) -> slice:
        """Append; `aligned` to 64 bits."""
        if aligned:
            self._used += self._used % 2
        part = self.take(len(values))
        self.array[part] = values
        return part

    def upload(self, target: Tensor | None) -> Tensor:
        """Everything written so far, on the device."""
        if target is None:
            return self._words
        target[: self._used].copy_(self._words[: self._used], non_blocking=True)
        self._uploaded = torch.cuda.Event()
        self._uploaded.record(torch.cuda.current_stream(target.device))
        return target
