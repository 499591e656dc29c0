"""The headers of model files, which are read without torch."""

import errno
import fcntl
import hashlib
import mmap
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from os import stat_result
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from types import MappingProxyType
from typing import BinaryIO

from gguf import LlamaFileType

from model_zoo.gguf.cursor import Cursor
from model_zoo.gguf.header import MetadataValue, TensorInfo, read_header
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.split import check_part, further_parts, merged_tensors, model_stem
from runtime.errors import ModelFileError

_FILE_TYPES = {
    kind.value: kind.name.removeprefix("MOSTLY_").removeprefix("ALL_")
    for kind in LlamaFileType
    if kind is not LlamaFileType.GUESSED
}


class ModelHeaders:
    """The validated header of a model file, or those of all parts of a split one.

    Texts in `metadata` are str, arrays of them list[str], arrays of numbers read-only numpy arrays;
    `kinds` has the type numbers of the values. `modified_at`: unix seconds.
    """

    def __init__(self, parts: Sequence["FilePart"]) -> None:
        first = parts[0]
        self.path = first.path
        self.version = first.header.version
        self.metadata: Mapping[str, MetadataValue] = first.header.metadata
        self.kinds: Mapping[str, int] = first.header.kinds
        self.tensors: Mapping[str, TensorInfo] = first.header.tensors
        if len(parts) > 1:
            headers = {part.path: part.header for part in parts}
            self.tensors = MappingProxyType(merged_tensors(headers))
        self.size_bytes = sum(part.size_bytes for part in parts)
        self.modified_at = max(part.modified_at for part in parts)
        self.identity = tuple(part.identity for part in parts)
        self.parts = tuple(parts)

    @classmethod
    def open(cls, path: Path | str) -> "ModelHeaders":
        """Reads the header of the file and, if it is the first part of a split model, those of the
        other parts beside it.

        Arrays of the metadata are left out, which takes less than half the time. ModelFileError if
        a file is missing or damaged, UnsupportedModelError if it is not supported.
        """
        return cls(open_parts(Path(path), arrays=False))

    def has(self, name: str) -> bool:
        """Whether the file has the tensor NAME.weight."""
        return f"{name}.weight" in self.tensors

    @cached_property
    def main_type(self) -> str | None:
        """The name of the block type of most weights; None for a file without tensors."""
        elements: Counter[str] = Counter()
        for info in self.tensors.values():
            elements[info.type.name] += info.elements
        return elements.most_common(1)[0][0] if elements else None

    def quantization(self, metadata: Metadata) -> str:
        """The quantisation that the file states, else the type of most of its weights. `metadata`:
        that of this file; ModelFileError if the value is no integer."""
        stated = _FILE_TYPES.get(metadata.get("general.file_type", int, -1))
        return stated or self.main_type or "unknown"

    @property
    def stem(self) -> str:
        """The file name without suffix and part number: a name for a model without one."""
        return model_stem(self.path)

    @property
    def digest(self) -> str:
        """SHA-256 in hex of headers and sizes of all parts; it does not cover the data."""
        digest = hashlib.sha256()
        for part in self.parts:
            digest.update(memoryview(part.map)[: part.header_bytes])
            digest.update(part.size_bytes.to_bytes(8, "little"))
        return digest.hexdigest()


def open_parts(path: Path, *, arrays: bool) -> list["FilePart"]:
    """The file and, if it is the first part of a split model, the other parts beside it; errors as
    of `ModelHeaders.open`."""
    first = FilePart.open(path, arrays=arrays)
    others = further_parts(first.path, first.header.metadata)
    parts = [first]
    for number, other in enumerate(others, start=1):
        parts.append(FilePart.open(other, arrays=arrays))
        check_part(other, parts[-1].header.metadata, number, len(others) + 1)
    return parts


class FilePart:
    """One file of a model. `map`: its bytes, read-only. `identity`: device, inode, bytes and time
    of the last change; equal for opened files with the same content.

    As long as the file is mapped, it has a shared lock (flock), so that the store does not remove
    it: on a network file system, that would break the maps of other hosts.
    """

    def __init__(self, path: Path, data: mmap.mmap, status: stat_result, *, arrays: bool) -> None:
        self.path = path
        self.map = data
        self.header = read_header(Cursor(data, str(path)), arrays=arrays)
        self.size_bytes = len(data)
        self.header_bytes = min(self.header.data_begin, len(data))
        self.modified_at = status.st_mtime
        self.identity = status.st_dev, status.st_ino, len(data), status.st_mtime_ns

    @classmethod
    def open(cls, path: Path, *, arrays: bool) -> "FilePart":
        try:
            _check_kind(path, path.stat())
            with path.open("rb") as file:
                _lock(file)
                path.stat()  # it may have been removed before it was locked
                status = os.fstat(file.fileno())
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelFileError(f"{path}: there is no such file.") from None
        except OSError as error:
            raise ModelFileError(f"{path}: cannot be read: {error.strerror}.") from error
        except ValueError as error:  # a path with a NUL, or a file that just became empty
            raise ModelFileError(f"{str(path)!r}: cannot be read: {error}.") from error
        return cls(path, data, status, arrays=arrays)


def _lock(file: BinaryIO) -> None:
    """The lock belongs to the open file, which the map keeps. Without effect on a file system that
    has no locks. OSError if the file is gone, or another process removes or writes it now."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OSError(error.errno, "another process has locked it; try again") from None
    except OSError as error:
        if error.errno == errno.ESTALE:
            raise


def _check_kind(path: Path, status: stat_result) -> None:
    if S_ISDIR(status.st_mode):
        is_checkpoint = (path / "config.json").is_file()
        hint = " `caravan convert` writes one from its safetensors." if is_checkpoint else ""
        raise ModelFileError(f"{path}: is a directory, not a model file.{hint}")
    if not S_ISREG(status.st_mode):
        raise ModelFileError(f"{path}: is not a regular file.")
    if status.st_size == 0:
        raise ModelFileError(f"{path}: is empty (0 bytes).")
