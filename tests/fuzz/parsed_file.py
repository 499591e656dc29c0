"""Parses a model file into keys and tensors, so that a mutation can leave the rest intact."""

import struct
from dataclasses import dataclass

from tests.unit.model_zoo.gguf.gguf_bytes import ARRAY, STRING, array, pair, u32, u64

WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_ALIGNMENT = 32


@dataclass
class Key:
    """`value`: the raw bytes after the type; for arrays `items` instead, of type `item_kind`."""

    name: bytes
    kind: int
    value: bytes = b""
    item_kind: int = 0
    items: list[bytes] | None = None

    def bytes(self) -> bytes:
        if self.items is None:
            return pair(self.name, self.kind, self.value)
        elements = b"".join(self.items)
        return pair(self.name, ARRAY, array(self.item_kind, len(self.items), elements))


@dataclass
class ParsedFile:
    """`infos`: the raw tensor entries of the header."""

    version: int
    keys: list[Key]
    tensor_count: int
    infos: bytes
    data: bytes

    def bytes(self) -> bytes:
        begin = b"GGUF" + u32(self.version) + u64(self.tensor_count) + u64(len(self.keys))
        header = begin + b"".join(key.bytes() for key in self.keys) + self.infos
        return header + bytes(-len(header) % _ALIGNMENT) + self.data


def parse(data: bytes) -> ParsedFile | None:
    """None if the structure of the file is damaged."""
    try:
        return _Parser(data).file()
    except (struct.error, KeyError, OverflowError):
        return None


class _Parser:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 4

    def file(self) -> ParsedFile:
        version = self._number("I")
        tensor_count, key_count = self._number("Q"), self._number("Q")
        keys = [self._key() for _ in range(key_count)]
        begin = self._at
        for _ in range(tensor_count):
            self._text()
            dimensions = self._number("I")
            self._skip(8 * dimensions + 4 + 8)
        infos = self._data[begin : self._at]
        data = self._data[self._at + -self._at % _ALIGNMENT :]
        return ParsedFile(version, keys, tensor_count, infos, data)

    def _key(self) -> Key:
        name, kind = self._text()[8:], self._number("I")
        if kind != ARRAY:
            return Key(name, kind, self._value(kind))
        item_kind, count = self._number("I"), self._number("Q")
        return Key(name, kind, b"", item_kind, [self._value(item_kind) for _ in range(count)])

    def _value(self, kind: int) -> bytes:
        if kind == STRING:
            return self._text()
        return self._skip(WIDTHS[kind])

    def _text(self) -> bytes:
        """Including the length before it."""
        length = self._number("Q")
        self._at -= 8
        return self._skip(8 + length)

    def _number(self, code: str) -> int:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _skip(self, count: int) -> bytes:
        begin = self._at
        self._at += count
        if self._at > len(self._data):
            raise struct.error("beyond the end")
        return self._data[begin : self._at]
