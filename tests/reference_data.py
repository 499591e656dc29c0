"""Published vocabularies and chat templates, where the machine has them."""

import struct
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tools.reference_data import folders

_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


def reference_data(name: str) -> Path:
    """A file or folder of the reference data; skips the test where there is none."""
    for folder in folders():
        if (path := folder / name).exists():
            return path
    pytest.skip("no published vocabularies and templates: make reference-data")


def reference_files(folder: str, pattern: str) -> list[Path]:
    """All files of a folder of the reference data, in every place that has it."""
    return [path for place in folders() for path in (place / folder).glob(pattern)]


@cache
def vocabulary_metadata(name: str) -> dict[str, Any]:
    """The metadata of vocab/ggml-vocab-<name>.gguf, without the project's own reader."""
    return _Metadata(reference_data(f"vocab/ggml-vocab-{name}.gguf").read_bytes()).read()


class _Metadata:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 4 + 4 + 8  # magic, version, number of tensors

    def read(self) -> dict[str, Any]:
        count = self._number("Q")
        return {self._string(): self._value(self._number("I")) for _ in range(count)}

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            kind, count = self._number("I"), self._number("Q")
            return [self._value(kind) for _ in range(count)]
        return self._number(_NUMBERS[kind])

    def _string(self) -> str:
        length = self._number("Q")
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return value
