"""A fake CUDA device that computes nothing, but counts a step's launches, copies and waits.

Tensors on it have shapes and types, but no elements; those of the host are real. An operation that
needs an element on the host, whose shape depends on elements, or that mixes devices, is an error.
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.kernels.triton import launch

DEVICE = torch.device("cuda", 0)
CAPABILITY = (9, 0)
PROPERTIES = SimpleNamespace(name="H100", multi_processor_count=132, total_memory=80 << 30)
# c10::impl::device_guard_impl_registry, and indices of it in c10/core/DeviceType.h.
_GUARDS, _CUDA, _META = "_ZN3c104impl26device_guard_impl_registryE", 1, 14

_WITHOUT_KERNEL = frozenset(
    """empty empty_strided empty_like new_empty new_empty_strided detach detach_ _unsafe_view
    lift_fresh alias resize_ set_ record_stream""".split()
)
# They read as many bytes of their first argument as they return.
_GATHERING = frozenset("index_select gather embedding index _unsafe_index".split())
# They write as many bytes of their first argument as their last one has.
_SCATTERING = frozenset("index_copy_ index_put_ _index_put_impl_ index_add_ scatter_".split())
# They write to a few rows of the tensors of which others read what is visible.
_WRITING_KERNELS = frozenset("prepare_kernel write_kernel".split())
# They read nothing of the argument that they are given for its shape.
_FILLING = frozenset("fill_ zero_ full_like zeros_like ones_like copy_".split())


class SynchronisationError(AssertionError):
    """An operation makes the host wait for the device."""


class CaptureError(AssertionError):
    """A graph cannot have captured what happened."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel, and the bytes that it reads and writes."""

    name: str
    nbytes: int


@dataclass(slots=True)
class Counts:
    """What happened on the device.

    An operation of torch counts as one launch, even if it takes several kernels (sorting, sums),
    and so does a CUDA graph, with the bytes of all its kernels. A tensor counts with its elements,
    but not with repetitions of one that is expanded. Copies between host and device are counted by
    direction; `pageable_uploads` are those from host memory that is not pinned: the driver copies
    it first and may wait.
    """

    launches: list[Launch] = field(default_factory=list)
    uploads: int = 0
    pageable_uploads: int = 0
    downloads: int = 0

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.launches)

    @property
    def frequencies(self) -> Counter[str]:
        return Counter(each.name for each in self.launches)


class DeviceTensor(Tensor):
    """A tensor on the device: that of torch's meta device with the same shape and storage."""

    meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor) -> "DeviceTensor":
        self = Tensor._make_subclass(
            cls, meta, meta.requires_grad, dispatch_device=True, device_for_backend_keys=DEVICE
        )
        self.meta = meta
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.device:
        """Without the device there are no operations but the question for it."""
        assert func is torch.ops.prim.device.default, f"{func} without a device"
        return DEVICE


class FakeGraph:
    """Stands for `torch.cuda.CUDAGraph`: what is captured is counted when it is replayed."""

    def __init__(self, fake: "FakeCuda") -> None:
        self._fake = fake
        self.pool: object = None
        self.launches: list[Launch] = []
        self.calls: list[Callable[[], object]] = []  # of devices that compute
        self.replays = 0

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local", "other threads use the device"
        self.pool = pool
        self._fake.begin_capture(self)

    def capture_end(self) -> None:
        self._fake.end_capture()

    def replay(self) -> None:
        self.replays += 1
        self._fake.replay(self)


class FakeCuda(TorchDispatchMode):
    """Runs operations on host tensors, and counts those on tensors of `DEVICE`.

    During a capture, only operations on the device are possible: no copies from or to the host, and
    no pinned memory, which the device's allocator does not have.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled; the wrapper that declares it takes a sixth of the time."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[FakeGraph] = []
        self._capturing: FakeGraph | None = None
        self._counts = Counts()
        self._pinned: WeakSet[torch.UntypedStorage] = WeakSet()
        self._parts: WeakKeyDictionary[torch.UntypedStorage, tuple[int, int]] = WeakKeyDictionary()

    @contextmanager
    def counting(self) -> Iterator[Counts]:
        """Counts from here on."""
        self._counts = Counts()
        yield self._counts
        self._counts = Counts()

    def use_partly(self, tensor: Tensor, nbytes: int, *, written: int | None = None) -> None:
        """Triton kernels read or write `nbytes` of `tensor`, as of the pages that rows see, and
        those that write to pages only `written`; of other arguments they read or write all."""
        self._parts[tensor.untyped_storage()] = nbytes, nbytes if written is None else written

    def start(
        self,
        kernel: Any,
        grid: Sequence[int],
        arguments: Sequence[object],
        options: dict[str, object],
        device: torch.device,
    ) -> None:
        """Instead of `runtime.kernels.triton.launch.start`."""
        assert device == DEVICE, f"{kernel.__name__} starts on {device}"
        assert set(kernel.arg_names[len(arguments) :]) <= options.keys(), kernel.__name__
        assert not any(isinstance(option, Tensor) for option in options.values()), kernel.__name__
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        for tensor in tensors:
            assert tensor.device == DEVICE, f"{kernel.__name__} has an argument on {tensor.device}"
        writes = kernel.__name__ in _WRITING_KERNELS
        if options.get("WHOLE"):  # only rows with long contexts have states
            named = dict(zip(kernel.arg_names, arguments, strict=False))
            tensors = [t for t in tensors if t is not named["states"] and t is not named["sums"]]
        # Some kernels have one tensor twice, as numbers of another type.
        distinct = {
            (t.untyped_storage(), t.storage_offset() * t.itemsize, _nbytes(t)) for t in tensors
        }
        nbytes = sum(self._parts.get(part, (n, n))[writes] for part, _, n in distinct)
        self._note(Launch(kernel.__name__, nbytes))

    @property
    def captures(self) -> bool:
        return self._capturing is not None

    def begin_capture(self, graph: FakeGraph) -> None:
        assert self._capturing is None
        self._capturing = graph
        self.graphs.append(graph)

    def end_capture(self) -> None:
        self._capturing = None

    def replay(self, graph: FakeGraph) -> None:
        self._note(Launch("graph", sum(each.nbytes for each in graph.launches)))

    def _note(self, launch: Launch) -> None:
        within = self._counts if self._capturing is None else self._capturing
        within.launches.append(launch)

    def _computed(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """After an operation on the device."""

    def event(self) -> Any:
        return _Inert()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return DEVICE
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        pinned = kwargs.pop("pin_memory", False)
        tensors = tensors_in((args, kwargs))
        device = kwargs.get("device")
        to_device = device is not None and torch.device(device).type == "cuda"
        if not to_device and not any(isinstance(tensor, DeviceTensor) for tensor in tensors):
            result = func(*args, **kwargs)
            if pinned:
                self._forbid_in_captures("allocates pinned memory")
                self._pinned.add(result.untyped_storage())
            return result
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if name == "_local_scalar_dense":
            raise SynchronisationError("the host reads an element of a tensor on the device")
        if name == "copy_" and len({tensor.device for tensor in tensors}) > 1:
            result = self._copied(*args[:2], *args[2:], **kwargs)
            self._computed(func, args, kwargs, result)
            return result
        if name == "_to_copy" and device is not None and not to_device:
            raise SynchronisationError("the host waits for a copy of a tensor on the device")
        uploads = to_device and any(tensor.device.type == "cpu" for tensor in tensors)
        if uploads:
            self._note_upload(tensors[0])
        result = _without_elements(func, args, kwargs, uploads)
        if not (uploads or func.is_view or name in _WITHOUT_KERNEL):
            self._note_launch(name, tensors, result)
        self._computed(func, args, kwargs, result)
        return result

    def _copied(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """A copy between host and device. What arrives on the host are ones: tokens of that number,
        and numbers that are finite."""
        if target.device == DEVICE:
            self._note_upload(source)
            return target
        if not non_blocking or target.untyped_storage() not in self._pinned:
            raise SynchronisationError("the host waits for a copy of a tensor on the device")
        self._forbid_in_captures("copies to the host")
        self._counts.downloads += 1
        return target.fill_(1)

    def _forbid_in_captures(self, what: str) -> None:
        if self._capturing is not None:
            raise CaptureError(f"a captured computation {what}")

    def _note_upload(self, source: Tensor) -> None:
        self._forbid_in_captures("copies from the host")
        self._counts.uploads += 1
        self._counts.pageable_uploads += source.untyped_storage() not in self._pinned

    def _note_launch(self, name: str, tensors: Sequence[Tensor], result: object) -> None:
        written = sum(map(_nbytes, tensors_in(result)))
        if not written:
            return
        read = [_nbytes(tensor) for tensor in tensors if tensor.device == DEVICE]
        if name in _GATHERING:
            read[0] = written
        elif name in _SCATTERING:
            read[0], written = 0, read[-1]
        elif name in _FILLING:
            read[0] = 0
        self._note(Launch(name, sum(read) + written))


@contextmanager
def fake_cuda(
    fake: FakeCuda | None = None, capability: tuple[int, int] = CAPABILITY
) -> Iterator[FakeCuda]:
    """Tensors may be made on `DEVICE`; streams of torch do nothing."""
    _set_device_guard()
    fake = fake or FakeCuda()
    names = ("_lazy_init", "Stream", "current_stream", "stream", "device", "synchronize")
    torchs: dict[str, Callable[..., Any]] = dict.fromkeys(names, _Inert)
    torchs["Event"] = lambda **options: fake.event()
    torchs["CUDAGraph"] = lambda: FakeGraph(fake)
    torchs["graph_pool_handle"] = object
    torchs["current_device"] = lambda: DEVICE.index
    torchs["get_device_capability"] = lambda device: capability
    torchs["get_device_properties"] = lambda device: PROPERTIES
    _forget_devices()
    lifts = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` copies to the device by an operation
    try:
        with (
            patch.multiple(torch.cuda, **torchs),
            patch("runtime.kernels.triton.launch.start", fake.start),
            fake,
        ):
            yield fake
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts)
        _forget_devices()


def _forget_devices() -> None:
    launch.has_kernels.cache_clear()
    launch.capability.cache_clear()


def _set_device_guard() -> None:
    """Builds without CUDA have no guard of its devices; that of meta tensors does nothing."""
    torch._C._ensureCUDADeviceGuardSet()  # for builds with CUDA on a machine without a device
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(c10, _GUARDS)
    guards[_CUDA] = guards[_CUDA] or guards[_META]


class _Inert:
    """Stands for events, streams and guards."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def record(self, *arguments: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *arguments: Any) -> None:
        pass


def _without_elements(func: Any, args: Any, kwargs: Any, uploads: bool) -> Any:
    """The result on the device. Of the host's tensors, only numbers may be arguments, unless the
    operation uploads them."""
    given: dict[int, DeviceTensor] = {}

    def meta_of(value: Any) -> Any:
        if isinstance(value, DeviceTensor):
            given[id(value.meta)] = value
            return value.meta
        if not isinstance(value, Tensor):
            return value
        assert uploads or value.dim() == 0, f"{func} mixes devices"
        return value.to("meta")

    def on_device(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        known = given.get(id(value))
        assert known is None or known.shape == value.shape, f"{func} changes a shape"
        return DeviceTensor(value) if known is None else known

    meta_args, meta_kwargs = mapped(meta_of, (args, kwargs))
    if meta_kwargs.get("device") is not None:
        meta_kwargs["device"] = torch.device("meta")
    return mapped(on_device, _meta_result(func, meta_args, meta_kwargs))


def _meta_result(func: Any, args: Any, kwargs: Any) -> Any:
    """What the operation returns for meta tensors. For shapes and types of new tensors, which those
    of the arguments determine, torch needs a fifth of a millisecond: they are derived once."""
    if any(each.alias_info for each in func._schema.returns):
        return func(*args, **kwargs)
    key = func, _outline(args), _outline(kwargs)
    if key in _OUTLINES:
        shape, strides, dtype = _OUTLINES[key]
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    result = func(*args, **kwargs)
    if isinstance(result, Tensor):
        _OUTLINES[key] = result.shape, result.stride(), result.dtype
    return result


_SEQUENCES = (list, tuple)  # `list | tuple` would be made anew by each call
# By operation and arguments.
_OUTLINES: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}


def _outline(value: Any) -> Any:
    """What the shape and type of a result depend on. Equal numbers may be of different types."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.storage_offset(), value.dtype
    if isinstance(value, _SEQUENCES):
        return tuple([_outline(each) for each in value])
    if isinstance(value, dict):
        return tuple([(key, _outline(each)) for key, each in value.items()])
    return type(value), value


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Arguments or results of an operation of torch with `function` applied to each. They are
    lists, tuples and dictionaries only, for which `torch.utils._pytree` takes four times as long.
    """
    if isinstance(value, _SEQUENCES):
        return type(value)([mapped(function, each) for each in value])
    if isinstance(value, dict):
        return {key: mapped(function, each) for key, each in value.items()}
    return function(value)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors among arguments or results of an operation."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, _SEQUENCES):
        return []
    return [tensor for each in value for tensor in tensors_in(each)]


@cache
def _is_composite(func: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def _nbytes(tensor: Tensor) -> int:
    distinct = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        distinct *= size if stride else min(size, 1)
    return distinct * tensor.element_size()
