"""Writing GGUF files as a stream: first the plan of all tensors, then their bytes in pieces."""

import os
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGUFValueType
from torch import Tensor

from runtime.errors import ConfigurationError
from runtime.quant.block_types import block_type

ALIGNMENT = 32
_MAGIC, _VERSION = b"GGUF", 3
_LITTLE: Mapping[GGUFValueType, str] = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


@dataclass(frozen=True, slots=True)
class Field:
    """A metadata value and how it is stored; `element` is the type of an array's elements."""

    value: Any
    type: GGUFValueType
    element: GGUFValueType | None = None


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor to come: `shape` in torch order, `type` a block type's name."""

    name: str
    shape: tuple[int, ...]
    type: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * block_type(self.type).row_bytes(self.shape[-1])


def field(value: Any) -> Field:
    """`value` as readers expect it: texts, truth values, uint32, float32, arrays of int32 or these.

    An array's elements are all of one kind; an empty one has no type and may not be written.
    """
    if isinstance(value, Field):
        return value
    if isinstance(value, list | tuple):
        element = _scalar_type(value[0])
        if element is GGUFValueType.UINT32:
            element = GGUFValueType.INT32
        return Field(list(value), GGUFValueType.ARRAY, element)
    return Field(value, _scalar_type(value))


class GGUFOutput:
    """The files under way; pieces of tensors are appended in the order of the plan."""

    def __init__(self, parts: Sequence["_Part"]) -> None:
        self._parts = tuple(parts)
        self._queue = [(part, tensor) for part in parts for tensor in part.tensors]
        self._left = self._queue[0][1].nbytes if self._queue else 0
        self._next = 0

    @property
    def paths(self) -> tuple[Path, ...]:
        """Where the files are once the output is closed, the first part first."""
        return tuple(part.path for part in self._parts)

    def append(self, name: str, data: Tensor) -> None:
        """uint8 of any shape: the whole tensor `name`, or its next rows in a file's own blocks."""
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
    metadata: Mapping[str, Field],
    tensors: Sequence[PlannedTensor],
    *,
    split_bytes: int | None = None,
) -> Iterator[GGUFOutput]:
    """Files that bear their names only once all is written; after an error none is left.

    With `split_bytes`, parts of at most so many bytes of tensors, or of one larger tensor, named
    `<stem>-00001-of-00003.gguf`. ConfigurationError when the place cannot be written.
    """
    parts: list[_Part] = []
    try:
        _check_space(path, tensors)
        groups = _groups(tensors, split_bytes)
        for number, group in enumerate(groups):
            parts.append(_open(_part_path(path, number, len(groups)), group))
            fields = _part_fields(metadata, number, len(groups), len(tensors))
            parts[-1].file.write(_header(fields, group))
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
class _Part:
    path: Path
    partial: Path
    file: BinaryIO
    tensors: Sequence[PlannedTensor]


def _check_space(path: Path, tensors: Sequence[PlannedTensor]) -> None:
    """Told before hours of work rather than after; the headers are small beside the tensors."""
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


def _open(path: Path, tensors: Sequence[PlannedTensor]) -> _Part:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    return _Part(path, partial, partial.open("wb"), tensors)


def _part_fields(
    metadata: Mapping[str, Field], number: int, count: int, tensors: int
) -> Mapping[str, Field]:
    """What the part tells; the first one alone carries the model's metadata."""
    fields = dict(metadata) if number == 0 else {}
    if count > 1:
        fields["split.no"] = Field(number, GGUFValueType.UINT16)
        fields["split.count"] = Field(count, GGUFValueType.UINT16)
        fields["split.tensors.count"] = Field(tensors, GGUFValueType.INT32)
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


def _header(fields: Mapping[str, Field], tensors: Sequence[PlannedTensor]) -> bytes:
    begin = _MAGIC + struct.pack("<IQQ", _VERSION, len(tensors), len(fields))
    pairs = (_text(key) + _value(field) for key, field in fields.items())
    header = begin + b"".join(pairs) + _infos(tensors)
    return header + bytes(-len(header) % ALIGNMENT)


def _infos(tensors: Sequence[PlannedTensor]) -> bytes:
    infos, offset = [], 0
    for tensor in tensors:
        sizes = tuple(reversed(tensor.shape))  # a file counts from the fastest varying one
        numbers = (len(sizes), *sizes, block_type(tensor.type).id, offset)
        infos.append(_text(tensor.name) + struct.pack(f"<I{len(sizes)}QIQ", *numbers))
        offset += tensor.nbytes + -tensor.nbytes % ALIGNMENT
    return b"".join(infos)


def _value(field: Field) -> bytes:
    kind = struct.pack("<I", field.type)
    if field.type is not GGUFValueType.ARRAY:
        return kind + _scalar(field.value, field.type)
    assert field.element is not None
    begin = kind + struct.pack("<IQ", field.element, len(field.value))
    if field.element is GGUFValueType.STRING:
        return begin + b"".join(map(_text, field.value))
    return begin + np.asarray(field.value).astype(_LITTLE[field.element]).tobytes()


def _scalar(value: Any, type: GGUFValueType) -> bytes:
    return _text(value) if type is GGUFValueType.STRING else struct.pack(_LITTLE[type], value)


def _text(text: str) -> bytes:
    encoded = text.encode(errors="replace")
    return struct.pack("<Q", len(encoded)) + encoded


def _scalar_type(value: Any) -> GGUFValueType:
    if isinstance(value, bool):
        return GGUFValueType.BOOL
    if isinstance(value, int):
        return GGUFValueType.UINT32
    return GGUFValueType.FLOAT32 if isinstance(value, float) else GGUFValueType.STRING
