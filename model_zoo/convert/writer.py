"""Writes GGUF files as a stream: first the headers with all planned tensors, then their data.

`gguf.GGUFWriter` writes the headers. It accepts only whole tensors, so the data are written here:
`caravan convert` holds at most one stored tensor in memory, and a tensor of stacked experts is
written expert by expert.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from torch import Tensor

from runtime.errors import ConfigurationError
from runtime.quant.block_types import block_type

ALIGNMENT = 32


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


class GGUFOutput:
    """The open files; pieces of tensors must be appended in the order of the plan."""

    def __init__(self, parts: Sequence["_PartFile"]) -> None:
        self._parts = tuple(parts)
        self._queue = [(part, tensor) for part in parts for tensor in part.tensors]
        self._left = self._queue[0][1].nbytes if self._queue else 0
        self._next = 0

    @property
    def paths(self) -> tuple[Path, ...]:
        """Final paths of the parts, in order."""
        return tuple(part.path for part in self._parts)

    def append(self, name: str, data: Tensor) -> None:
        """Appends uint8 of any shape: the next rows of the tensor `name`, in its block type."""
        part, tensor = self._queue[self._next]
        assert tensor.name == name, (tensor.name, name)
        view = data.contiguous().numpy().data.cast("B")
        assert len(view) <= self._left, (name, len(view), self._left)
        part.file.write(view)
        self._left -= len(view)
        if self._left == 0:
            part.file.write(bytes(-tensor.nbytes % ALIGNMENT))
            self._next += 1
            if self._next < len(self._queue):
                self._left = self._queue[self._next][1].nbytes

    def _finish(self) -> None:
        assert self._next == len(self._queue), self._queue[self._next][1].name
        for part in self._parts:
            part.file.close()
        for part in self._parts:
            part.partial.replace(part.path)

    def _discard(self) -> None:
        for part in self._parts:
            part.file.close()
            part.partial.unlink(missing_ok=True)


@contextmanager
def gguf_output(
    path: Path,
    metadata: Mapping[str, MetadataField],
    tensors: Sequence[PlannedTensor],
    *,
    split_bytes: int | None = None,
) -> Iterator[GGUFOutput]:
    """Files that get their final names when complete; none remains after an error.

    With `split_bytes`, several parts named `<stem>-00001-of-00003.gguf`, each with at most that
    many bytes of tensors, or one larger tensor. ConfigurationError if they cannot be written.
    """
    parts: list[_PartFile] = []
    try:
        _check_space(path, tensors)
        groups = _groups(tensors, split_bytes)
        for number, group in enumerate(groups):
            fields = _part_fields(metadata, number, len(groups), len(tensors))
            parts.append(_begin(_part_path(path, number, len(groups)), fields, group))
        output = GGUFOutput(parts)
        yield output
        output._finish()
    except OSError as error:
        GGUFOutput(parts)._discard()
        raise ConfigurationError(f"{path}: cannot be written: {error.strerror}.") from error
    except BaseException:
        GGUFOutput(parts)._discard()
        raise


@dataclass(frozen=True, slots=True)
class _PartFile:
    path: Path
    partial: Path
    file: BinaryIO
    tensors: Sequence[PlannedTensor]


def _check_space(path: Path, tensors: Sequence[PlannedTensor]) -> None:
    """Checks the free disk space in advance; the headers' size is negligible."""
    needed = sum(tensor.nbytes for tensor in tensors)
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise ConfigurationError(
            f"{path}: needs {needed:,} bytes, but its disk has only {free:,} free."
        )


def _part_path(path: Path, number: int, count: int) -> Path:
    return (
        path if count == 1 else path.with_name(f"{path.stem}-{number + 1:05d}-of-{count:05d}.gguf")
    )


def _begin(
    path: Path, fields: Mapping[str, MetadataField], tensors: Sequence[PlannedTensor]
) -> _PartFile:
    """Creates the partial file with its header."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        _write_header(partial, fields, tensors)
        file = partial.open("ab")
        file.write(bytes(-file.tell() % ALIGNMENT))
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return _PartFile(path, partial, file, tensors)


def _part_fields(
    metadata: Mapping[str, MetadataField], number: int, count: int, tensors: int
) -> Mapping[str, MetadataField]:
    """Metadata of a part: only the first has the model's."""
    fields = dict(metadata) if number == 0 else {}
    if count > 1:
        fields["split.no"] = MetadataField(number, GGUFValueType.UINT16)
        fields["split.count"] = MetadataField(count, GGUFValueType.UINT16)
        fields["split.tensors.count"] = MetadataField(tensors, GGUFValueType.INT32)
    return fields


def _groups(
    tensors: Sequence[PlannedTensor], split_bytes: int | None
) -> list[Sequence[PlannedTensor]]:
    if split_bytes is None:
        return [tensors]
    groups: list[list[PlannedTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.nbytes > split_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    return list(groups)


def _write_header(
    path: Path, fields: Mapping[str, MetadataField], tensors: Sequence[PlannedTensor]
) -> None:
    writer = GGUFWriter(path, arch="")
    writer.kv_data[0].clear()  # `fields` has the architecture, and only in the first part
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
