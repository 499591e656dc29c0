"""Reads a file's header sequentially and checks every size before it reads or allocates."""

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from runtime.errors import ModelFileError

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_LENGTH_BYTES = _U64.size


class Cursor:
    """A position in the mapped bytes of the file `name`, which only moves forward."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.position = 0
        self.name = name
        self.size = len(data)
        self._data = data
        self._end, self._limit = self.size, ""

    @contextmanager
    def bounded(self, nbytes: int, part: str) -> Iterator[None]:
        """A context in which reading more than `nbytes` from here raises ModelFileError.

        part: the part of the file, for the message.
        """
        self._end = min(self.size, self.position + nbytes)
        self._limit = f"{part} may take {nbytes:,} bytes at most"
        yield
        self._end = self.size

    @property
    def remaining(self) -> int:
        return self.size - self.position

    def error(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.name}: {problem}.")

    def advance(self, count: int, thing: str) -> int:
        """Skips `count` bytes, which the file must have, and returns the position of the first."""
        begin = self.position
        if count > self.remaining:
            raise self.error(
                f"the file ends in {thing}: it needs {count:,} bytes at byte {begin:,}, "
                f"but the file has only {self.size:,}"
            )
        if begin + count > self._end:
            raise self._too_long(thing)
        self.position = begin + count
        return begin

    def peek(self, count: int) -> bytes:
        """The next `count` bytes, or fewer at the end of the file."""
        return self._data[self.position : self.position + count]

    def u32(self, thing: str) -> int:
        return self.scalar(_U32, thing)

    def u64(self, thing: str) -> int:
        return self.scalar(_U64, thing)

    def count(self, thing: str, *, least_bytes: int) -> int:
        """A signed 64-bit count of things that take at least `least_bytes` each."""
        value = self.u64(thing)
        if value >= 1 << 63:
            raise self.error(f"{thing} is negative ({value - (1 << 64):,})")
        if value * least_bytes > self.remaining:
            raise self.error(
                f"{thing} is {value:,}, but the remaining {self.remaining:,} bytes of the file "
                f"hold {self.remaining // least_bytes:,} at most"
            )
        return value

    def scalar(self, layout: struct.Struct, thing: str) -> Any:
        begin = self.advance(layout.size, thing)
        return layout.unpack_from(self._data, begin)[0]

    def numbers(self, dtype: np.dtype, count: int, thing: str) -> np.ndarray:
        """[count] of `dtype`, copied out of the file."""
        begin = self.advance(count * dtype.itemsize, thing)
        return np.frombuffer(self._data, dtype=dtype, count=count, offset=begin).copy()

    def raw_string(self, thing: str, *, most_bytes: int | None = None) -> bytes:
        """Raises ModelFileError before reading if it is longer than `most_bytes`."""
        length = self.u64(f"the length of {thing}")
        if most_bytes is not None and length > most_bytes:
            raise self.error(f"{thing} has {length:,} bytes; {most_bytes:,} is the limit")
        self._check_string(length, thing)
        begin = self.advance(length, thing)
        return self._data[begin : begin + length]

    def string(self, thing: str) -> str:
        """A text value; bytes that are not UTF-8 become U+FFFD."""
        return self.raw_string(thing).decode(errors="replace")

    def identifier(self, thing: str, *, most_bytes: int) -> str:
        """A name, which must be UTF-8."""
        raw = self.raw_string(thing, most_bytes=most_bytes)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.error(f"{thing} is not UTF-8: {raw[:64]!r}") from None

    def strings(self, count: int, thing: str, *, wanted: bool = True) -> list[str]:
        """`count` text values, read in one loop because vocabularies have hundreds of thousands.

        If not `wanted`, they are skipped, and the list is empty.
        """
        texts = []
        data, end, position = self._data, self._end, self.position
        for index in range(count):
            begin = position + _LENGTH_BYTES
            if begin > end:
                raise self._in_array(thing, index, count)
            (length,) = _U64.unpack_from(data, position)
            position = begin + length
            if position > end:
                self.position = begin
                self._check_string(length, f"text {index:,} of {thing}")
                raise self._in_array(thing, index, count)
            if wanted:
                texts.append(data[begin:position].decode(errors="replace"))
        self.position = position
        return texts

    def _check_string(self, length: int, thing: str) -> None:
        if length > self.remaining:
            raise self.error(
                f"{thing} is {length:,} bytes long, but only {self.remaining:,} are left"
            )

    def _in_array(self, thing: str, index: int, count: int) -> ModelFileError:
        if self._end < self.size:
            return self._too_long(thing)
        return self.error(f"the file ends in {thing}, in text {index:,} of {count:,}")

    def _too_long(self, thing: str) -> ModelFileError:
        return self.error(f"{thing} is too long: {self._limit}")
