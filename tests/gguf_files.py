"""Writing GGUF files, and changing them, by the format's own package."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

_PLAIN_TYPES = {
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
    list: GGUFValueType.ARRAY,
}


class Reader(gguf.GGUFReader):
    """The package's own, whose arrays are plain views of the mapped file: numpy takes three times
    as long to make an array that is a part of a `memmap`, of which each key has several."""

    @property
    def data(self) -> np.ndarray:
        return self._data

    @data.setter
    def data(self, mapped: np.memmap) -> None:
        self._data = np.asarray(mapped)


def rewrite(
    source: Path,
    target: Path,
    *,
    keys: Mapping[str, Any] | None = None,
    own_keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | tuple[np.ndarray, str] | None] | None = None,
    architecture: str | None = None,
) -> Path:
    """Copy `source` to `target`; `keys` and `tensors` replace, add, or where None remove.

    `own_keys` are keys of the architecture, given without its name. `architecture`: another name of
    it, also in its keys. Tensors that are given are float32, in numpy's order of dimensions, or
    blocks and their type.
    """
    reader = Reader(source)
    keys, tensors = dict(keys or {}), dict(tensors or {})
    stated = reader.fields["general.architecture"].contents()
    own = f"{architecture or stated}."
    architecture = architecture or keys.pop("general.architecture", stated)
    keys |= {f"{architecture}.{key}": value for key, value in (own_keys or {}).items()}
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        if name.startswith(f"{stated}."):
            name = own + name.removeprefix(f"{stated}.")
        if name not in keys:
            kinds = [*field.types, None]
            writer.add_key_value(name, field.contents(), kinds[0], kinds[1])
    for name, value in keys.items():
        if value is not None:
            writer.add_key_value(name, value, _PLAIN_TYPES[type(value)])
    for tensor in reader.tensors:
        if tensor.name not in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, array in tensors.items():
        if array is not None:
            data, kind = array if isinstance(array, tuple) else (array, "F32")
            writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
    finish(writer)
    return target


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray | tuple[np.ndarray, str]]) -> Path:
    """A file of llama's architecture without further metadata. `tensors`: numbers, with the block
    type that they are stored in unless that is F32."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, array in tensors.items():
        numbers, kind = array if isinstance(array, tuple) else (array, "F32")
        stored = GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(numbers, stored), raw_dtype=stored)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    """Writes what was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def matrices(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a file as float32, in numpy's order of dimensions."""
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in Reader(path).tensors
    }


def block_types(path: Path) -> dict[str, str]:
    """The name of the block type of every tensor."""
    return {tensor.name: tensor.tensor_type.name for tensor in Reader(path).tensors}


def values_with_types(path: Path) -> dict[str, tuple[list[int], object]]:
    """The metadata as the `gguf` package reads them: each value with how it is stored."""
    return {
        key: ([*field.types], field.contents())
        for key, field in Reader(path).fields.items()
        if not key.startswith("GGUF.")
    }
