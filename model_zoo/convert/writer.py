"""Writes GGUF files as a stream: first the header with all planned tensors, then their data.

`gguf.GGUFWriter` writes the header. It accepts only whole tensors, so the data are written here:
`caravan convert` holds at most one stored tensor in memory, and a tensor of stacked experts is
written expert by expert.
"""

import os
import shutil
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf, prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from torch import Tensor

from runtime.errors import ConfigurationError
from runtime.quant.block_types import block_type

ALIGNMENT = 32
_RANGES = {
    GGUFValueType.UINT32: (0, (1 << 32) - 1),
    GGUFValueType.INT32: (-(1 << 31), (1 << 31) - 1),
    GGUFValueType.UINT64: (0, (1 << 64) - 1),
    GGUFValueType.FLOAT32: (-3.4e38, 3.4e38),
}


@dataclass(frozen=True, slots=True)
class MetadataField:
    """A metadata value and its type; `element`: type of an array's elements."""

    value: Any
    type: GGUFValueType
    element: GGUFValueType | None = None


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor to write: `shape` in torch order, `type`: name of a block type."""

    name: str
    shape: tuple[int, ...]
    type: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * block_type(self.type).row_bytes(self.shape[-1])


def field(value: Any) -> MetadataField:
    """`value` with the type that readers expect: text, boolean, uint32, float32, int32 in arrays.

    All elements of an array have one type. An empty array is an error: GGUFWriter writes none.
    """
    if isinstance(value, MetadataField):
        return value
    if isinstance(value, list | tuple):
        element = _scalar_type(value[0])
        if element is GGUFValueType.UINT32:
            element = GGUFValueType.INT32
        return MetadataField(list(value), GGUFValueType.ARRAY, element)
    return MetadataField(value, _scalar_type(value))


def is_representable(field: MetadataField) -> bool:
    """Whether the field's type has the value, which may be minus infinity."""
    numbers = field.value if field.element is not None else [field.value]
    low, high = _RANGES.get(field.element or field.type, (None, None))
    return low is None or all(number == -inf or low <= number <= high for number in numbers)


class GGUFOutput:
    """The open file; pieces of tensors must be appended in the order of the plan."""

    def __init__(self, path: Path, partial: Path, tensors: Sequence[PlannedTensor]) -> None:
        self.path = path
        self._partial = partial
        self._file = partial.open("ab")
        self._queue = deque(tensor for tensor in tensors if tensor.nbytes)
        self._written = 0  # of the first tensor in the queue
        self._pad(self._file.tell())

    def append(self, name: str, data: Tensor) -> None:
        """Appends uint8 of any shape: the next rows of the tensor `name`, in its block type.

        Tensors without weights are left out. ConfigurationError if it cannot be written.
        """
        tensor = self._queue[0]
        assert tensor.name == name, (tensor.name, name)
        view = data.contiguous().numpy().data.cast("B")
        self._written += len(view)
        assert self._written <= tensor.nbytes, (name, self._written, tensor.nbytes)
        with _write_errors(self.path):
            self._file.write(view)
            if self._written == tensor.nbytes:
                self._pad(tensor.nbytes)
                self._queue.popleft()
                self._written = 0

    def _pad(self, nbytes: int) -> None:
        self._file.write(bytes(-nbytes % ALIGNMENT))

    def _finish(self) -> None:
        assert not self._queue, self._queue[0].name
        with _write_errors(self.path):
            self._file.close()
            self._partial.replace(self.path)

    def _discard(self) -> None:
        self._partial.unlink(missing_ok=True)
        with suppress(OSError):  # it may still have to write, to a full disk
            self._file.close()


@contextmanager
def gguf_output(
    path: Path, metadata: Mapping[str, MetadataField], tensors: Sequence[PlannedTensor]
) -> Iterator[GGUFOutput]:
    """A file that gets its final name when it is complete; none remains after an error.

    ConfigurationError if it cannot be written.
    """
    with _write_errors(path):
        _check_space(path, tensors)
        output = _begin(path, metadata, tensors)
    try:
        yield output
        output._finish()
    except BaseException:
        output._discard()
        raise


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be written: {error.strerror}.") from error


def _check_space(path: Path, tensors: Sequence[PlannedTensor]) -> None:
    """Checks the free disk space in advance; the header's size is negligible."""
    needed = sum(tensor.nbytes for tensor in tensors)
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise ConfigurationError(
            f"{path}: needs {needed:,} bytes, but its disk has only {free:,} free."
        )


def _begin(
    path: Path, fields: Mapping[str, MetadataField], tensors: Sequence[PlannedTensor]
) -> GGUFOutput:
    """Creates the partial file with its header."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        _write_header(partial, fields, tensors)
        return GGUFOutput(path, partial, tensors)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _write_header(
    path: Path, fields: Mapping[str, MetadataField], tensors: Sequence[PlannedTensor]
) -> None:
    writer = GGUFWriter(path, arch="")
    writer.kv_data[0].clear()  # `fields` has the architecture
    for key, field in fields.items():
        writer.add_key_value(key, _encoded(field.value), field.type, field.element)
    for tensor in tensors:
        type = GGMLQuantizationType(block_type(tensor.type).id)
        float32 = np.dtype(np.float32)  # any type but uint8: `shape` counts weights, not bytes
        writer.add_tensor_info(tensor.name, tensor.shape, float32, tensor.nbytes, raw_dtype=type)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()


def _encoded(value: Any) -> Any:
    """Texts as UTF-8; JSON files may contain lone surrogates, which become question marks."""
    if isinstance(value, str):
        return value.encode(errors="replace")
    return [_encoded(item) for item in value] if isinstance(value, list) else value


def _scalar_type(value: Any) -> GGUFValueType:
    if isinstance(value, bool):
        return GGUFValueType.BOOL
    if isinstance(value, int):
        return GGUFValueType.UINT32
    return GGUFValueType.FLOAT32 if isinstance(value, float) else GGUFValueType.STRING
