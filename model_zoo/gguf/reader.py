"""GGUF files, memory-mapped: opening one reads its header, and weights are views of the map."""

import hashlib
import mmap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from os import stat_result
from pathlib import Path
from stat import S_ISDIR, S_ISREG

import torch
from torch import Tensor

from model_zoo.gguf.cursor import Cursor
from model_zoo.gguf.header import Header, MetadataValue, TensorInfo, read_header
from runtime.errors import ModelFileError
from runtime.quant import BlockType, Weight

_FETCH_BYTES = 32 << 20
_WORD_BYTES = 8


class GGUFFile:
    """A sound file: what its header says holds for its data.

    Texts in `metadata` are str, arrays of them list[str], arrays of numbers read-only numpy arrays.
    `modified_at` unix seconds. The map lives as long as the file or a weight of it.
    """

    def __init__(self, path: Path, data: mmap.mmap, header: Header, modified_at: float) -> None:
        self.path = path
        self.version = header.version
        self.metadata: Mapping[str, MetadataValue] = header.metadata
        self.tensors: Mapping[str, TensorInfo] = header.tensors
        self.size_bytes = len(data)
        self.modified_at = modified_at
        self._header_bytes = min(header.data_begin, len(data))
        self._map = data
        self._bytes = _as_tensor(data)

    @classmethod
    def open(cls, path: Path | str) -> "GGUFFile":
        """ModelFileError when the file is missing or damaged, its subclass when unsupported."""
        path = Path(path)
        try:
            status = path.stat()
            _check_kind(path, status)
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelFileError(f"{path}: there is no such file.") from None
        except OSError as error:
            raise ModelFileError(f"{path}: cannot be read: {error.strerror}.") from error
        return cls(path, data, read_header(Cursor(data, str(path))), status.st_mtime)

    @property
    def digest(self) -> str:
        """SHA-256 in hex over the header and the file's size: a name, not a check of the data."""
        digest = hashlib.sha256(memoryview(self._map)[: self._header_bytes])
        digest.update(self.size_bytes.to_bytes(8, "little"))
        return digest.hexdigest()

    def weight(self, name: str) -> Weight:
        """A view of the map, not a copy; KeyError when the file has no such tensor."""
        info = self.tensors[name]
        return self._view(info.begin, info.type, info.shape)

    def adjacent_rows(self, names: Sequence[str]) -> Weight | None:
        """The rows of these matrices as one view of the map; None unless they lie end to end."""
        infos = [self.tensors[name] for name in names]
        first = infos[0]
        end = first.begin
        for info in infos:
            alike = info.type == first.type and info.shape[1:] == first.shape[1:]
            if info.begin != end or not alike:
                return None
            end += info.nbytes
        rows = sum(info.shape[0] for info in infos)
        return self._view(first.begin, first.type, (rows, *first.shape[1:]))

    def fetch(self, name: str) -> Iterator[int]:
        """Bring a tensor from disk into memory; yields the bytes of each part once it is there."""
        info = self.tensors[name]
        end = info.begin + info.nbytes
        for begin in range(info.begin, end, _FETCH_BYTES):
            count = min(_FETCH_BYTES, end - begin)
            page = begin - begin % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, page, begin + count - page)
            self._bytes[begin : begin + count : mmap.PAGESIZE].sum()
            yield count

    def _view(self, begin: int, type: BlockType, shape: tuple[int, ...]) -> Weight:
        stored = (*shape[:-1], type.row_bytes(shape[-1]))
        data = self._bytes[begin : begin + prod(stored)].view(stored)
        # Only a file with a tiny alignment of its own making places numbers across their words.
        return Weight(data.clone() if begin % _WORD_BYTES else data, type, shape)


def _check_kind(path: Path, status: stat_result) -> None:
    if S_ISDIR(status.st_mode):
        raise ModelFileError(f"{path}: is a directory, not a model file.")
    if not S_ISREG(status.st_mode):
        raise ModelFileError(f"{path}: is not a regular file.")
    if status.st_size == 0:
        raise ModelFileError(f"{path}: is empty (0 bytes).")


def _as_tensor(data: mmap.mmap) -> Tensor:
    """uint8 [bytes] over the map itself.

    torch has no read-only tensors and warns of that. Nothing here writes to weights, and the
    alternative, a private writable map, is refused for files larger than the machine's memory.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(data, dtype=torch.uint8)
