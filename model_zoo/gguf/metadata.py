"""Typed access to a file's metadata, tolerant of the types that converters use for a key."""

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np

from model_zoo.gguf.header import MetadataValue
from runtime.errors import ModelFileError

T = TypeVar("T", int, float, str, bool)

_GLOBAL = ("general.", "tokenizer.", "split.", "adapter.", "xielu.")
_WORDS = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
_MAX_SIZE = (1 << 31) - 1
# More layers than any model has, but few enough that a damaged count costs little.
MAX_LAYERS = 1024


class Metadata:
    """A file's metadata.

    Keys are given without the architecture's name, except those of `_GLOBAL` prefixes. All
    errors are ModelFileErrors that name the file and the full key.
    """

    def __init__(self, values: Mapping[str, MetadataValue], *, path: Path) -> None:
        self.path = path
        self._values = values
        self._prefix = ""
        self._prefix = f"{self.require('general.architecture', str)}."

    @property
    def architecture(self) -> str:
        return self._prefix[:-1]

    def full_key(self, key: str) -> str:
        return key if key.startswith(_GLOBAL) else self._prefix + key

    def error(self, key: str, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: `{self.full_key(key)}` {problem}.")

    def has(self, key: str) -> bool:
        return self.full_key(key) in self._values

    def length(self, key: str) -> int | None:
        """Length of the array under `key`; None if it is absent or not an array."""
        value = self._values.get(self.full_key(key))
        return len(value) if isinstance(value, list | np.ndarray) else None

    def require(self, key: str, kind: type[T]) -> T:
        """The value under `key`, as `kind`."""
        return self._converted(key, self._required(key), kind)

    @overload
    def get(self, key: str, kind: type[T], default: T) -> T: ...
    @overload
    def get(self, key: str, kind: type[T], default: None = None) -> T | None: ...
    def get(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """The value under `key`, as `kind`; `default` if absent."""
        value = self._values.get(self.full_key(key))
        return default if value is None else self._converted(key, value, kind)

    def require_size(self, key: str, *, at_most: int = _MAX_SIZE) -> int:
        """The integer under `key`, from 1 to `at_most`."""
        return self._size(key, self.require(key, int), at_most)

    def get_size(self, key: str, default: int, *, at_most: int = _MAX_SIZE) -> int:
        return self._size(key, self.get(key, int, default), at_most)

    def get_positive(self, key: str, default: float | None = None) -> float:
        """The number above 0 under `key`, which is required if there is no default."""
        value = self.require(key, float) if default is None else self.get(key, float, default)
        if value <= 0:
            raise self.error(key, f"is {value:g}; it must be above 0")
        return value

    def require_array(self, key: str, kind: type[T], *, infinite: bool = False) -> tuple[T, ...]:
        """The array under `key`, each element as `kind`; `infinite` allows infinite numbers."""
        value = self._required(key)
        if not isinstance(value, list | np.ndarray):
            raise self.error(key, f"is {value!r}, not an array")
        if infinite and kind is float:
            ends = (float("inf"), float("-inf"))
            return tuple(
                item if item in ends else self._converted(key, item, kind)
                for item in map(_plain, value)
            )
        return tuple(self._converted(key, item, kind) for item in value)

    def get_array(self, key: str, kind: type[T]) -> tuple[T, ...] | None:
        return self.require_array(key, kind) if self.has(key) else None

    def require_size_of(self, key: str, layer: int, *, at_most: int = _MAX_SIZE) -> int:
        """The integer of a layer, from 1 to `at_most`, from an array or from a single value."""
        if self.length(key) is None:
            return self.require_size(key, at_most=at_most)
        listed = self.require_array(key, int)
        if layer >= len(listed):
            raise self.error(key, f"has {len(listed):,} entries, none for layer {layer:,}")
        return self._size(key, listed[layer], at_most)

    def require_per_layer(self, key: str, layers: int, *, at_least: int = 1) -> tuple[int, ...]:
        """An integer from `at_least` on for each layer, from an array or from a single value."""
        assert layers <= MAX_LAYERS
        value = self._required(key)
        listed = value if isinstance(value, list | np.ndarray) else [value] * layers
        if len(listed) != layers:
            raise self.error(key, f"has {len(listed):,} entries for {layers:,} layers")
        numbers = (self._converted(key, item, int) for item in listed)
        return tuple(self._size(key, number, _MAX_SIZE, at_least) for number in numbers)

    def get_per_layer(
        self, key: str, layers: int, default: tuple[int, ...], *, at_least: int = 1
    ) -> tuple[int, ...]:
        return self.require_per_layer(key, layers, at_least=at_least) if self.has(key) else default

    def _required(self, key: str) -> MetadataValue:
        value = self._values.get(self.full_key(key))
        if value is None:
            raise self.error(key, "is missing")
        return value

    def _size(self, key: str, value: int, at_most: int, at_least: int = 1) -> int:
        if value < at_least:
            raise self.error(key, f"is {value:,}; it must be {at_least} or more")
        if value > at_most:
            raise self.error(key, f"is {value:,}; {at_most:,} is the limit")
        return value

    def _converted(self, key: str, value: Any, kind: type[T]) -> Any:
        """`value` as `kind`, without loss: integers of any width, and floats without a fraction as
        integers."""
        value = _plain(value)
        if kind is str and isinstance(value, str):
            return value
        if kind is bool and isinstance(value, int) and value in (0, 1):
            return bool(value)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind is float and number and isfinite(value):
            return float(value)
        if kind is int and number and abs(value) < 1 << 64 and value == int(value):
            return int(value)
        shown = repr(value) if not isinstance(value, list | np.ndarray) else "an array"
        raise self.error(key, f"is {shown[:80]}, not {_WORDS[kind]}")


def _plain(value: Any) -> Any:
    """A numpy scalar as a Python number."""
    return value.item() if isinstance(value, np.generic) else value
