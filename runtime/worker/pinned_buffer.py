"""A host buffer that is filled from front to back and uploaded in one copy."""

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

_TYPES = (torch.int64, torch.int32, torch.float32, torch.bool)
# Bytes; alignment of every part. Triton compiles kernels anew for addresses with a smaller one.
ALIGNMENT = 16


class PinnedBuffer:
    """Parts of one buffer, on the host and on the device.

    `device_bytes` uint8: what `upload` copies to; None on a CPU, where the host's memory is the
    device's. The tensors of `take` and `put` have their values after `upload`.
    """

    def __init__(self, nbytes: int, device_bytes: Tensor | None) -> None:
        host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device_bytes is not None)
        self._host, self._device = host, host if device_bytes is None else device_bytes
        self._arrays = {kind: _viewed(host, kind).numpy() for kind in _TYPES}
        self._tensors = {kind: _viewed(self._device, kind) for kind in _TYPES}
        self.used = 0  # bytes of all parts
        self._uploaded: torch.cuda.Event | None = None

    def clear(self, *, keep: int = 0) -> None:
        """Wait as `wait`, then start again after the parts in the first `keep` bytes."""
        self.wait()
        self.used = keep

    def wait(self) -> None:
        """Wait until the last upload has finished, so that the host's arrays may be written."""
        if self._uploaded is not None:
            self._uploaded.synchronize()

    def take(self, count: int, dtype: torch.dtype, *, room: int = 0) -> tuple[NDArray[Any], Tensor]:
        """`count` elements: the host array to write, and the tensor on the device. The next part
        begins after `room` elements, if `count` is not larger."""
        begin = self.used // dtype.itemsize
        end, tensor = begin + count, self._tensors[dtype]
        assert end <= len(tensor), "the plan is larger than any plan may be"
        after = (begin + max(count, room)) * dtype.itemsize
        self.used = -(-after // ALIGNMENT) * ALIGNMENT
        return self._arrays[dtype][begin:end], tensor[begin:end]

    def put(self, values: ArrayLike, dtype: torch.dtype, *, room: int = 0) -> Tensor:
        """A tensor with the shape of `values`."""
        array: NDArray[Any] = np.asarray(values, self._arrays[dtype].dtype)
        host, tensor = self.take(array.size, dtype, room=room)
        host[:] = array.ravel()
        return tensor if array.ndim == 1 else tensor.view(array.shape)

    def on_host(self, part: Tensor) -> NDArray[Any]:
        """The host array of a contiguous part, in its shape."""
        begin = part.storage_offset()
        return self._arrays[part.dtype][begin : begin + part.numel()].reshape(part.shape)

    def upload(self, nbytes: int | None = None) -> None:
        """Upload all parts taken so far, or the first `nbytes` bytes."""
        if self._device is self._host:
            return
        end = self.used if nbytes is None else nbytes
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        self._uploaded = torch.cuda.Event()
        self._uploaded.record(torch.cuda.current_stream(self._device.device))


def _viewed(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """The buffer as elements of this type, without the bytes after the last whole one."""
    return buffer[: len(buffer) // dtype.itemsize * dtype.itemsize].view(dtype)
