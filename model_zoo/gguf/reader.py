"""Memory-mapped GGUF files: opening reads the header, and weights are views of the map."""

import hashlib
import mmap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from os import stat_result
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from types import MappingProxyType

import torch
from torch import Tensor

from model_zoo.gguf.cursor import Cursor
from model_zoo.gguf.header import MetadataValue, TensorInfo, read_header
from model_zoo.gguf.split import check_part, further_parts, merged_tensors, model_stem
from runtime.errors import ModelFileError
from runtime.quant.block_types import BlockType, Weight

_FETCH_BYTES = 32 << 20
_WORD_BYTES = 8


class GGUFFile:
    """A validated model file, or all parts of a split one.

    Texts in `metadata` are str, arrays of them list[str], arrays of numbers read-only numpy arrays;
    `kinds` has the type numbers of the values. `modified_at`: unix seconds. The maps live as long
    as the file or a weight of it.

    The file must not be truncated while it is mapped: reading a page beyond its new end kills the
    process (SIGBUS). `fetch` checks the size before and after each part that it reads and raises
    an error if it changed; a truncation between two checks, or after loading, is not detected. A
    file that is replaced by rename, as the store and the converter do, stays intact here.
    """

    def __init__(self, parts: Sequence["_MappedFile"]) -> None:
        first = parts[0]
        self.path = first.path
        self.version = first.header.version
        self.metadata: Mapping[str, MetadataValue] = first.header.metadata
        self.kinds: Mapping[str, int] = first.header.kinds
        self.tensors: Mapping[str, TensorInfo] = first.header.tensors
        if len(parts) > 1:
            self.tensors = MappingProxyType(
                merged_tensors({part.path: part.header for part in parts})
            )
        self.size_bytes = sum(part.size_bytes for part in parts)
        self.modified_at = max(part.modified_at for part in parts)
        # Equal for opened files with the same content.
        self.identity = tuple(part.identity for part in parts)
        self._parts = tuple(parts)
        self._part_of = {name: part for part in parts for name in part.header.tensors}

    @classmethod
    def open(cls, path: Path | str, *, arrays: bool = True) -> "GGUFFile":
        """Opens the file and, if it is the first part of a split model, the other parts beside it.

        Without `arrays`, arrays of the metadata are not read, which takes less than half the time.
        ModelFileError if a file is missing or damaged, UnsupportedModelError if it is not
        supported.
        """
        first = _MappedFile.open(Path(path), arrays=arrays)
        others = further_parts(first.path, first.header.metadata)
        parts = [first]
        for number, other in enumerate(others, start=1):
            parts.append(_MappedFile.open(other, arrays=arrays))
            check_part(other, parts[-1].header.metadata, number, len(others) + 1)
        return cls(parts)

    @property
    def stem(self) -> str:
        """The file name without suffix and part number: a name for a model without one."""
        return model_stem(self.path)

    @property
    def digest(self) -> str:
        """SHA-256 in hex of headers and sizes of all parts; it does not cover the data."""
        digest = hashlib.sha256()
        for part in self._parts:
            digest.update(memoryview(part.map)[: part.header_bytes])
            digest.update(part.size_bytes.to_bytes(8, "little"))
        return digest.hexdigest()

    def weight(self, name: str) -> Weight:
        """A view of the map; KeyError if the file has no such tensor."""
        info = self.tensors[name]
        return self._part_of[name].view(info.begin, info.type, info.shape)

    def adjacent_rows(self, names: Sequence[str]) -> Weight | None:
        """The rows of these matrices as one view of the map; None unless they are contiguous."""
        infos = [self.tensors[name] for name in names]
        first, part = infos[0], self._part_of[names[0]]
        end = first.begin
        for info in infos:
            alike = info.type == first.type and info.shape[1:] == first.shape[1:]
            if info.begin != end or not alike or self._part_of[info.name] is not part:
                return None
            end += info.nbytes
        rows = sum(info.shape[0] for info in infos)
        return part.view(first.begin, first.type, (rows, *first.shape[1:]))

    def evenly_spaced(self, names: Sequence[str]) -> Weight | None:
        """Tensors of one shape and type as one view (n, ...); None unless they are equidistant."""
        infos = [self.tensors[name] for name in names]
        first, part = infos[0], self._part_of[names[0]]
        step = infos[1].begin - first.begin if len(infos) > 1 else first.nbytes
        for index, info in enumerate(infos):
            alike = info.type == first.type and info.shape == first.shape
            even = info.begin == first.begin + index * step and step >= first.nbytes
            if not (alike and even and self._part_of[info.name] is part):
                return None
        return part.spaced(first.begin, first.type, (len(infos), *first.shape), step)

    def fetch(self, name: str, begin: int = 0, nbytes: int | None = None) -> Iterator[int]:
        """Reads a tensor, or `nbytes` of it from `begin`, from disk into memory.

        Yields the number of bytes of each part that was read. ModelFileError if the file's size has
        changed since it was opened.
        """
        info = self.tensors[name]
        count = info.nbytes - begin if nbytes is None else nbytes
        return self._part_of[name].fetch(info.begin + begin, count)


class _MappedFile:
    """One mapped file."""

    def __init__(self, path: Path, data: mmap.mmap, status: stat_result, *, arrays: bool) -> None:
        self.path = path
        self.map = data
        self.header = read_header(Cursor(data, str(path)), arrays=arrays)
        self.size_bytes = len(data)
        self.header_bytes = min(self.header.data_begin, len(data))
        self.modified_at = status.st_mtime
        self.identity = status.st_dev, status.st_ino, len(data), status.st_mtime_ns
        self._bytes = _as_tensor(data)

    @classmethod
    def open(cls, path: Path, *, arrays: bool) -> "_MappedFile":
        try:
            status = path.stat()
            _check_kind(path, status)
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelFileError(f"{path}: there is no such file.") from None
        except OSError as error:
            raise ModelFileError(f"{path}: cannot be read: {error.strerror}.") from error
        except ValueError as error:  # a path with a NUL, or a file that just became empty
            raise ModelFileError(f"{str(path)!r}: cannot be read: {error}.") from error
        return cls(path, data, status, arrays=arrays)

    def view(self, begin: int, type: BlockType, shape: tuple[int, ...]) -> Weight:
        stored = (*shape[:-1], type.row_bytes(shape[-1]))
        data = self._bytes[begin : begin + prod(stored)].view(stored)
        # Numbers are unaligned only in files with an unusually small alignment.
        return Weight(data.clone() if begin % _WORD_BYTES else data, type, shape)

    def spaced(
        self, begin: int, type: BlockType, shape: tuple[int, ...], step: int
    ) -> Weight | None:
        """Tensors that begin `step` bytes apart; None if numbers would be unaligned."""
        if begin % _WORD_BYTES or step % _WORD_BYTES:
            return None
        stored = (*shape[:-1], type.row_bytes(shape[-1]))
        inner = torch.empty(stored[1:], device="meta").stride()
        return Weight(self._bytes.as_strided(stored, (step, *inner), begin), type, shape)

    def fetch(self, begin: int, nbytes: int) -> Iterator[int]:
        end = begin + nbytes
        for at in range(begin, end, _FETCH_BYTES):
            count = min(_FETCH_BYTES, end - at)
            page = at - at % mmap.PAGESIZE
            self._check_size()
            self.map.madvise(mmap.MADV_WILLNEED, page, at + count - page)
            self._bytes[at : at + count : mmap.PAGESIZE].sum()
            self._check_size()
            yield count

    def _check_size(self) -> None:
        found = self.map.size()  # of the file, not of the map
        if found != self.size_bytes:
            raise ModelFileError(
                f"{self.path}: has {found:,} bytes, but had {self.size_bytes:,} when it was "
                "opened; it is being written. Load it again when it is complete."
            )


def _check_kind(path: Path, status: stat_result) -> None:
    if S_ISDIR(status.st_mode):
        raise ModelFileError(f"{path}: is a directory, not a model file.")
    if not S_ISREG(status.st_mode):
        raise ModelFileError(f"{path}: is not a regular file.")
    if status.st_size == 0:
        raise ModelFileError(f"{path}: is empty (0 bytes).")


def _as_tensor(data: mmap.mmap) -> Tensor:
    """uint8 [bytes], a view of the map.

    torch warns because it has no read-only tensors, but weights are never written. A private
    writable map is not an alternative: the kernel refuses it for files larger than the machine's
    memory.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(data, dtype=torch.uint8)
