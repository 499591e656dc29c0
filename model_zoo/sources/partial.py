"""A partly downloaded blob, with a journal of the received bytes that survives the process.

The journal is a file of 64-bit numbers beside the blob: the blob's size, the length of a part, and
for each part the number of bytes that are present. Bytes are counted when the disk has them: after
they were written, a network file system may refuse them when they are synchronised.
"""

import os
import struct
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self

from model_zoo.store.file_access import file_errors
from model_zoo.store.store import journal_of
from runtime.errors import StoreError

MAX_PARTS = 4096
# Bytes that are written before they are synchronised and counted. More are rarely lost if the
# process is killed; less would let the disk limit the download.
COUNTED_BYTES = 64 << 20
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

    The caller holds the blob's lock. StoreError when the file cannot be read or written, also when
    it is closed, unless another error is raised then.
    """

    def __init__(self, path: Path, *, size: int, part_bytes: int) -> None:
        self._path = path
        self._size = size
        self._uncounted = 0
        self._failed = False
        self._lock, self._counting = Lock(), Lock()
        with ExitStack() as opened:
            self._file = _open(path, opened)
            self._journal = _open(journal_of(path), opened)
            self.parts: list[BlobPart] = self._read_journal()
            if not self.parts:
                self.restart(part_bytes)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with file_errors("write", self._path), self._opened:
                self._count()
        except StoreError:
            if kind is None:
                raise

    @property
    def completed(self) -> int:
        return sum(part.done for part in self.parts)

    def restart(self, part_bytes: int) -> None:
        """Discards all bytes and divides the blob into parts of at least `part_bytes`."""
        part_bytes = max(1, part_bytes, -(-self._size // MAX_PARTS))
        self.parts, self._uncounted = _divide(self._size, part_bytes), 0
        with file_errors("write", self._path):
            os.ftruncate(self._journal, 0)
            os.ftruncate(self._file, 0)
            os.ftruncate(self._file, self._size)
            counts = bytes(_COUNT.size * len(self.parts))
            os.pwrite(self._journal, _HEADER.pack(self._size, part_bytes) + counts, 0)

    def write(self, part: BlobPart, data: bytes) -> None:
        """Writes the part's next bytes."""
        assert len(data) <= part.missing
        with file_errors("write", self._path):
            try:
                _write_all(self._file, data, part.begin + part.done)
                part.done += len(data)
                if self._are_due(len(data)):
                    self._count()
            except OSError:
                # The error may be that of earlier bytes, and is reported only once.
                self._failed = True
                raise

    def _are_due(self, nbytes: int) -> bool:
        """Whether bytes are to be counted, after `nbytes` more."""
        with self._lock:
            self._uncounted += nbytes
            if self._uncounted < COUNTED_BYTES:
                return False
            self._uncounted = 0
            return True

    def _count(self) -> None:
        """Counts the bytes that are written so far, unless some of them may be lost."""
        with self._counting:
            counts = b"".join(_COUNT.pack(part.done) for part in self.parts)
            if not self._failed:
                os.fdatasync(self._file)
            if not self._failed:  # a write may have failed meanwhile
                os.pwrite(self._journal, counts, _HEADER.size)

    def _read_journal(self) -> list[BlobPart]:
        """The parts that an earlier process left; empty if the journal is inconsistent."""
        with file_errors("read", journal_of(self._path)):
            raw = os.pread(self._journal, _HEADER.size + _COUNT.size * MAX_PARTS, 0)
            found = os.fstat(self._file).st_size
        if len(raw) < _HEADER.size or found != self._size:
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


def _open(path: Path, opened: ExitStack) -> int:
    """The descriptor, which `opened` closes."""
    with file_errors("write", path):
        mode = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, mode, 0o644)
    opened.callback(os.close, descriptor)
    return descriptor


def _write_all(file: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, at)
        view, at = view[written:], at + written
