"""Mapped files, and tensors as views of them."""

import mmap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from model_zoo.gguf.header import TensorInfo
from runtime.errors import ModelFileError
from runtime.quant.block_types import BlockType
from runtime.quant.weight import Weight

# Tensors begin at multiples of it, except in files with an unusually small alignment.
WORD_BYTES = 8
_FETCH_BYTES = 32 << 20


class MappedBytes:
    """A file that is mapped read-only, as long as this object or a view of it exists.

    The file must not be truncated while it is mapped: reading a page beyond its new end kills the
    process (SIGBUS). `fetch` checks the size before and after each part that it reads and raises
    an error if it changed; a truncation between two checks, or after loading, is not detected.
    """

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.map = data
        self.size_bytes = len(data)
        self._bytes = _as_tensor(data)

    def view(self, begin: int, type: BlockType, shape: tuple[int, ...]) -> Weight:
        stored = type.data_shape(shape)
        data = self._bytes[begin : begin + prod(stored)].view(stored)
        return Weight(data.clone() if begin % WORD_BYTES else data, type, shape)

    def spaced(
        self, begin: int, type: BlockType, shape: tuple[int, ...], step: int
    ) -> Weight | None:
        """Tensors that begin `step` bytes apart; None if numbers would be unaligned."""
        if begin % WORD_BYTES or step % WORD_BYTES:
            return None
        stored = type.data_shape(shape)
        inner = torch.empty(stored[1:], device="meta").stride()
        return Weight(self._bytes.as_strided(stored, (step, *inner), begin), type, shape)

    def fetch(self, begin: int, nbytes: int, *, sparse: bool = False) -> Iterator[int]:
        """Reads these bytes from disk into memory; yields the number of bytes of each part that was
        read. ModelFileError if the file's size has changed since it was opened. `sparse`: few of
        them will be used, so they stay in the page cache only, and not in this process's memory."""
        end = begin + nbytes
        for at in range(begin, end, _FETCH_BYTES):
            count = min(_FETCH_BYTES, end - at)
            page = at - at % mmap.PAGESIZE
            self._check_size()
            self.map.madvise(mmap.MADV_WILLNEED, page, at + count - page)
            self._bytes[at : at + count : mmap.PAGESIZE].sum()
            self._check_size()
            if sparse:
                self.map.madvise(mmap.MADV_DONTNEED, page, at + count - page)
            yield count

    def _check_size(self) -> None:
        found = self.map.size()  # of the file, not of the map
        if found != self.size_bytes:
            raise ModelFileError(
                f"{self.path}: has {found:,} bytes, but had {self.size_bytes:,} when it was "
                "opened; it is being written. Load it again when it is complete."
            )


class MappedTensors:
    """Tensors by name, as views of the mapped files that have them."""

    def __init__(self, tensors: Mapping[str, TensorInfo], maps: Mapping[str, MappedBytes]) -> None:
        self.tensors, self._maps = tensors, maps

    def shape(self, name: str, dimensions: int) -> tuple[int, ...]:
        """The tensor's shape with at least `dimensions`; ggml writes no leading dimensions of 1."""
        stated = self.tensors[name].shape
        return (1,) * (dimensions - len(stated)) + stated

    def weight(self, name: str, *, dimensions: int = 1) -> Weight:
        """A view of the map, in at least so many dimensions; KeyError if there is no such
        tensor."""
        info = self.tensors[name]
        return self._maps[name].view(info.begin, info.type, self.shape(name, dimensions))

    def adjacent_rows(self, names: Sequence[str]) -> Weight | None:
        """The rows of these matrices as one view of the map; None unless they are contiguous."""
        infos = [self.tensors[name] for name in names]
        first, mapped = infos[0], self._maps[names[0]]
        end = first.begin
        for info in infos:
            alike = info.type == first.type and info.shape[1:] == first.shape[1:]
            if info.begin != end or not alike or self._maps[info.name] is not mapped:
                return None
            end += info.nbytes
        rows = sum(info.shape[0] for info in infos)
        return mapped.view(first.begin, first.type, (rows, *first.shape[1:]))

    def evenly_spaced(self, names: Sequence[str], *, dimensions: int = 1) -> Weight | None:
        """Tensors of one shape and type as one view (n, ...), each with at least `dimensions`
        dimensions; None unless they are equidistant."""
        infos = [self.tensors[name] for name in names]
        first, mapped = infos[0], self._maps[names[0]]
        step = infos[1].begin - first.begin if len(infos) > 1 else first.nbytes
        for index, info in enumerate(infos):
            alike = info.type == first.type and info.shape == first.shape
            even = info.begin == first.begin + index * step and step >= first.nbytes
            if not (alike and even and self._maps[info.name] is mapped):
                return None
        shape = len(infos), *self.shape(first.name, dimensions)
        return mapped.spaced(first.begin, first.type, shape, step)

    def fetch(
        self, name: str, begin: int = 0, nbytes: int | None = None, *, sparse: bool = False
    ) -> Iterator[int]:
        """Reads a tensor, or `nbytes` of it from `begin`, from disk into memory; see
        `MappedBytes.fetch`."""
        info = self.tensors[name]
        count = info.nbytes - begin if nbytes is None else nbytes
        return self._maps[name].fetch(info.begin + begin, count, sparse=sparse)


def _as_tensor(data: mmap.mmap) -> Tensor:
    """uint8 [bytes], a view of the map.

    torch warns because it has no read-only tensors, but weights are never written. A private
    writable map is not an alternative: the kernel refuses it for files larger than the machine's
    memory.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(data, dtype=torch.uint8)
