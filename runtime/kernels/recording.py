"""Recording of the kernel calls of a computation, to repeat them by one call into C.

A recorded computation reads inputs at fixed addresses and consists of native kernels only. Its
tensors are allocated in an arena, so that repeated calls find the same addresses. Any torch
operation that reads or writes elements makes it unrecordable.
"""

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_INTEGERS, _FLOATS = 14, 4
_ALIGNMENT = 64  # bytes
# Functions whose int result depends on their arguments alone; others return 0 on success.
_PURE = frozenset({"caravan_matmul_knows", "caravan_embedding_knows", "caravan_has_integers"})
_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty"})
# These operations may return views; where they copy elements, they are not recordable either.
_VIEWS = frozenset(
    "alias as_strided chunk contiguous expand expand_as flatten narrow permute reshape select "
    "slice split split_with_sizes squeeze t to transpose unbind unflatten unsqueeze view "
    "view_as".split()
)
_READS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__})
_active = threading.local()
Result = TypeVar("Result")


class NotRecordableError(Exception):
    """A computation does more than call kernels; the message names the operation. `result`: that of
    the computation, if it has run and only its recording has failed."""

    def __init__(self, reason: str, result: object = None) -> None:
        super().__init__(reason)
        self.result = result


class _Call(ctypes.Structure):
    """`caravan_call` in cpu/replay.c."""

    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("integers", ctypes.c_int64 * _INTEGERS),
        ("floats", ctypes.c_float * _FLOATS),
        ("checked", ctypes.c_int64),
    )


def recordable(function: Any) -> Callable[..., Any]:
    """A function of the native library, whose calls in this thread are recorded during a `record`.

    Functions that only compute sizes (they return int64 or are listed above) are not recorded.
    """
    name, result = function.__name__, function.restype
    if result is ctypes.c_int64 or name in _PURE:
        return function

    def call(*arguments: Any) -> Any:
        status = function(*arguments)
        recorder = getattr(_active, "recorder", None)
        if recorder is not None:
            recorder.add(function, arguments, status)
        return status

    return call


def aligned_bytes(nbytes: int) -> int:
    """The bytes that a tensor of `nbytes` bytes takes in an arena."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Arena:
    """The memory that all recordings of one thread share, since they run one after the other."""

    def __init__(self, nbytes: int) -> None:
        memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
        begin = -memory.ctypes.data % _ALIGNMENT
        self.memory = memory[begin : begin + nbytes]


class Recording(Generic[Result]):
    """The calls of a computation and its result, whose tensors are valid until the arena is used
    again."""

    def __init__(
        self, calls: Sequence[_Call], names: Sequence[str], kept: Sequence[Any], result: Result
    ) -> None:
        self._calls = (_Call * len(calls))(*calls)
        self.names, self.result = tuple(names), result  # the functions, in order
        self._kept, self._threads = tuple(kept), torch.get_num_threads()

    def replay(self, kernels: ctypes.CDLL) -> Result:
        """Repeat the calls; the result, at the same addresses each time."""
        failed = kernels.caravan_replay(ctypes.byref(self._calls), len(self._calls), self._threads)
        if failed >= 0:
            raise RuntimeError(f"{self.names[failed]}, call {failed} of a step, has failed")
        return self.result


def record(computation: Callable[[], Result], arena: Arena) -> Recording[Result]:
    """Run a computation and record its calls. Raises NotRecordableError, possibly after a part of
    the computation has run."""
    recorder = _Recorder(arena)
    _active.recorder = recorder
    try:
        with recorder, _NoReads():
            result = computation()
    finally:
        _active.recorder = None
    return Recording(recorder.calls, recorder.names, recorder.kept, result)


class OperationMode(TorchDispatchMode):
    """A dispatch mode that does not import the compiler."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """True, as TorchDispatchMode documents it: nothing here is compiled, and disabling the
        compiler would import it, which takes 75 MB and a second."""
        return False


class _Recorder(OperationMode):
    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._allocator = _Allocator(arena.memory)
        self.calls: list[_Call] = []
        self.names: list[str] = []
        self.kept: list[Any] = []

    def add(self, function: Any, arguments: Sequence[Any], status: Any) -> None:
        name = function.__name__
        if status not in (None, 0):
            raise NotRecordableError(f"{name} returns {status}")
        integers, floats = [], []
        for kind, argument in zip(function.argtypes, arguments, strict=True):
            if kind is ctypes.c_float:
                floats.append(float(argument))
            elif isinstance(argument, int):
                integers.append(argument)
            else:
                integers.append(self._address(argument))
        assert len(integers) <= _INTEGERS and len(floats) <= _FLOATS, f"arguments of {name}"
        self.names.append(name)
        self.calls.append(
            _Call(
                ctypes.cast(function, ctypes.c_void_p).value,
                (ctypes.c_int64 * _INTEGERS)(*integers),
                (ctypes.c_float * _FLOATS)(*floats),
                status is not None,
            )
        )

    def _address(self, argument: Any) -> int:
        """The address that a `ctypes.byref` refers to; the recording keeps its object alive."""
        if argument is None:
            return 0
        self.kept.append(argument._obj)
        return ctypes.addressof(argument._obj)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _EMPTY:
            return self._allocator.like(result)
        if name not in _VIEWS or not _is_view(result, args):
            raise NotRecordableError(f"it uses the torch operation {func}")
        return result


class _NoReads(TorchFunctionMode):
    """Refuses reads of elements that are not torch operations, such as `data_ptr`."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READS:
            raise NotRecordableError(f"it uses {func.__name__}")
        return func(*args, **(kwargs or {}))


def _is_view(result: Any, args: Sequence[Any]) -> bool:
    """Whether a result, or each of several, shares the memory of the first argument."""
    results = result if isinstance(result, list | tuple) else [result]
    storage = args[0].untyped_storage().data_ptr()
    return all(each.untyped_storage().data_ptr() == storage for each in results)


class _Allocator:
    """Allocates tensors in one block of memory; bytes of unreferenced tensors are reused."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self._free = [(0, len(memory))]  # free ranges [begin, end), in order, not adjacent

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor with the shape, the strides and the type of this one."""
        nbytes = tensor.untyped_storage().nbytes()
        if not nbytes:
            return tensor
        part = self._take(aligned_bytes(nbytes))
        elements = torch.from_numpy(part).view(tensor.dtype)
        return elements.as_strided(tensor.shape, tensor.stride())

    def _take(self, nbytes: int) -> NDArray[np.uint8]:
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= nbytes:
                self._free[index : index + 1] = [(begin + nbytes, end)] * (end - begin > nbytes)
                part = self._memory[begin : begin + nbytes]
                weakref.finalize(part, self._release, begin, begin + nbytes).atexit = False
                return part
        raise NotRecordableError(f"it needs more than {len(self._memory):,} bytes")

    def _release(self, begin: int, end: int) -> None:
        merged: list[tuple[int, int]] = []
        for part in sorted((*self._free, (begin, end))):
            if merged and merged[-1][1] == part[0]:
                merged[-1] = (merged[-1][0], part[1])
            else:
                merged.append(part)
        self._free = merged
