"""A fake CUDA device that computes as late as possible: enqueued work runs when the host waits.

A step therefore reads host memory that was overwritten too early, and device memory that was reused
too early, just as on a device that is far behind the host."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.cuda.fake_device import DeviceTensor, FakeCuda, FakeGraph, mapped, tensors_in

_ALLOCATING = frozenset("empty empty_strided empty_like new_empty new_empty_strided".split())


class ComputingCuda(FakeCuda):
    """Tensors on the device have elements in memory of the host. What no operation has written yet
    is NaN, or the largest integer; a captured operation computes only when its graph is replayed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queue: deque[Callable[[], object]] = deque()
        self._enqueued = self._completed = 0

    def start(
        self,
        kernel: Any,
        grid: Sequence[int],
        arguments: Sequence[object],
        options: dict[str, Any],
        device: torch.device,
    ) -> None:
        super().start(kernel, grid, arguments, options, device)
        self._enqueue(partial(kernel[tuple(grid)], *map(_elements, arguments), **options))

    def replay(self, graph: FakeGraph) -> None:
        super().replay(graph)
        self._queue += graph.calls
        self._enqueued += len(graph.calls)

    def event(self) -> "_Event":
        return _Event(self)

    def complete(self, count: int | None = None) -> None:
        """Compute the first `count` operations ever enqueued, or all."""
        count = self._enqueued if count is None else count
        with _disable_current_modes(), torch.inference_mode():
            while self._completed < count:
                self._queue.popleft()()
                self._completed += 1

    @property
    def enqueued(self) -> int:
        return self._enqueued

    def _enqueue(self, call: Callable[[], object]) -> None:
        if self._capturing is not None:
            self._capturing.calls.append(call)
            return
        self._queue.append(call)
        self._enqueued += 1

    def _computed(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name, outs = func.overloadpacket.__name__, tensors_in(result)
        if name == "record_stream":
            return
        if name in _ALLOCATING:
            outs[0]._elements = _unwritten(outs[0])
            return
        real_args, real_kwargs = mapped(partial(self._read, name), (args, dict(kwargs)))
        if real_kwargs.get("device") is not None:
            real_kwargs["device"] = torch.device("cpu")
        call = partial(func, *real_args, **real_kwargs)
        if func.is_view:
            found = tensors_in(call())
            for out, elements in zip(outs, found, strict=True):
                out._elements = elements
        elif func._schema.is_mutable:
            self._enqueue(call)
            on_device = [out for out in outs if isinstance(out, DeviceTensor)]
            assert all(hasattr(out, "_elements") for out in on_device)
        else:
            targets = [_unwritten(out) for out in outs]
            for out, target in zip(outs, targets, strict=True):
                out._elements = target
            self._enqueue(partial(_store, call, targets))

    def _read(self, name: str, value: Any) -> Any:
        """Memory of the host that is not pinned is read at once."""
        if not isinstance(value, Tensor) or isinstance(value, DeviceTensor):
            return _elements(value)
        late = value.untyped_storage() in self._pinned or name == "copy_"
        return value if late else value.clone()


class _Event:
    def __init__(self, fake: ComputingCuda) -> None:
        self._fake, self._at = fake, 0

    def record(self, *arguments: Any) -> None:
        self._at = self._fake.enqueued

    def synchronize(self) -> None:
        self._fake.complete(self._at)


def _elements(value: Any) -> Any:
    return value._elements if isinstance(value, DeviceTensor) else value


def _store(call: Callable[[], Any], targets: Sequence[Tensor]) -> None:
    for target, found in zip(targets, tensors_in(call()), strict=True):
        target.copy_(found)


def _unwritten(like: Tensor) -> Tensor:
    found = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    if like.dtype.is_floating_point:
        return found.fill_(torch.nan)
    return found.fill_(True if like.dtype == torch.bool else torch.iinfo(like.dtype).max)
