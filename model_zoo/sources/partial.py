"""A partly downloaded blob, with a journal of the received bytes that survives the process.

The journal is a file of 64-bit numbers beside the blob: the blob's size, the length of a part, and
for each part the number of bytes that are present. Bytes are written before they are counted.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from model_zoo.store.file_access import file_error
from model_zoo.store.store import journal_of

MAX_PARTS = 4096
_HEADER = struct.Struct("<2Q")
_COUNT = struct.Struct("<Q")


@dataclass(slots=True)
class BlobPart:
    """Bytes `begin` to `end` of the blob; the first `done` of them are present."""

    number: int
    begin: int
    end: int
    done: int = 0

    @property
    def missing(self) -> int:
        return self.end - self.begin - self.done


class PartialBlob:
    """Open for writing by several threads, each in its own part.

    The caller holds the blob's lock. StoreError when the disk is full.
    """

    def __init__(self, path: Path, *, size: int, part_bytes: int) -> None:
        self._path = path
        self._size = size
        self._file = _open(path)
        self._journal = _open(journal_of(path))
        self.parts: list[BlobPart] = self._read_journal()
        if not self.parts:
            self.restart(part_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._file)
        os.close(self._journal)

    @property
    def completed(self) -> int:
        return sum(part.done for part in self.parts)

    def restart(self, part_bytes: int) -> None:
        """Discards all bytes and divides the blob into parts of at least `part_bytes`."""
        part_bytes = max(1, part_bytes, -(-self._size // MAX_PARTS))
        self.parts = _divide(self._size, part_bytes)
        try:
            os.ftruncate(self._journal, 0)
            os.ftruncate(self._file, 0)
            os.ftruncate(self._file, self._size)
            counts = bytes(_COUNT.size * len(self.parts))
            os.pwrite(self._journal, _HEADER.pack(self._size, part_bytes) + counts, 0)
        except OSError as error:
            raise file_error("write", self._path, error) from error

    def write(self, part: BlobPart, data: bytes) -> None:
        """Writes the part's next bytes."""
        assert len(data) <= part.missing
        try:
            _write_all(self._file, data, part.begin + part.done)
            part.done += len(data)
            at = _HEADER.size + _COUNT.size * part.number
            os.pwrite(self._journal, _COUNT.pack(part.done), at)
        except OSError as error:
            raise file_error("write", self._path, error) from error

    def _read_journal(self) -> list[BlobPart]:
        """The parts that an earlier process left; empty if the journal is inconsistent."""
        raw = os.pread(self._journal, _HEADER.size + _COUNT.size * MAX_PARTS, 0)
        if len(raw) < _HEADER.size or os.fstat(self._file).st_size != self._size:
            return []
        size, part_bytes = _HEADER.unpack_from(raw)
        if size != self._size or part_bytes * MAX_PARTS < size or not part_bytes:
            return []
        parts = _divide(size, part_bytes)
        if len(raw) != _HEADER.size + _COUNT.size * len(parts):
            return []
        for part in parts:
            (part.done,) = _COUNT.unpack_from(raw, _HEADER.size + _COUNT.size * part.number)
        return parts if all(part.missing >= 0 for part in parts) else []


def _divide(size: int, part_bytes: int) -> list[BlobPart]:
    begins = range(0, size, part_bytes)
    return [BlobPart(n, begin, min(size, begin + part_bytes)) for n, begin in enumerate(begins)]


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise file_error("write", path, error) from error


def _write_all(file: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, at)
        view, at = view[written:], at + written
