"""A GGUF file again with smaller weights: its metadata kept, its tensors in other blocks."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from gguf import GGUFValueType
from torch import Tensor

from model_zoo.convert.quantizers.rows import quantize
from model_zoo.convert.recipes import Facts, file_type, recipe_named, tensor_type
from model_zoo.convert.writer import Field, GGUFOutput, PlannedTensor, gguf_output
from model_zoo.gguf.header import MetadataValue, TensorInfo
from model_zoo.gguf.reader import GGUFFile
from runtime.errors import ConfigurationError, ModelFileError
from runtime.quant.block_types import dequantize

Progress = Callable[[int, int], None]

_QUANTIZATION_VERSION = 2
# Weights of a tensor that are in memory as float32 at once, if a row has no more.
_CHUNK = 1 << 24
_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
_INTEGERS = frozenset({"I8", "I16", "I32", "I64"})
# They describe the source's files, not the model.
_LAYOUT_KEYS = ("general.alignment", "split.no", "split.count", "split.tensors.count")
_LAYER = re.compile(r"blk\.(\d+)\.")
_ELEMENTS = {
    np.dtype(code): GGUFValueType[name]
    for code, name in (
        ("u1", "UINT8"),
        ("i1", "INT8"),
        ("<u2", "UINT16"),
        ("<i2", "INT16"),
        ("<u4", "UINT32"),
        ("<i4", "INT32"),
        ("<f4", "FLOAT32"),
        ("?", "BOOL"),
        ("<u8", "UINT64"),
        ("<i8", "INT64"),
        ("<f8", "FLOAT64"),
    )
}


def quantize_file(
    source: Path,
    out: Path,
    recipe: str,
    *,
    allow_requantize: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write the model at `source`, which may be the first of split files, to `out`; gives `out`.

    `progress` hears how many bytes of the source are done, and of how many. A file that is
    quantised already loses quality again, so it has to be allowed. ConfigurationError or
    ModelFileError when something forbids it; then nothing is left at `out` that was not there.
    """
    recipe_named(recipe)
    file = GGUFFile.open(source)
    _check_place(source, out)
    if not allow_requantize:
        _check_unquantized(file)
    facts = facts_of(file)
    plan = [_planned(info, recipe, facts) for info in file.tensors.values()]
    total, done = sum(info.nbytes for info in file.tensors.values()), 0
    with gguf_output(out, _fields(file, recipe), plan) as output:
        for tensor in plan:
            for nbytes in _write(file, tensor, output):
                done += nbytes
                if progress is not None:
                    progress(done, total)
    return out


def facts_of(file: GGUFFile) -> Facts:
    """What a recipe asks of the model in this file; what the file does not say counts as none."""
    architecture = file.metadata.get("general.architecture")
    key_heads = _first_count(file.metadata.get(f"{architecture}.attention.head_count_kv"))
    heads = _first_count(file.metadata.get(f"{architecture}.attention.head_count"))
    numbers = (_LAYER.match(name) for name in file.tensors)
    return Facts(
        layers=max((int(number[1]) + 1 for number in numbers if number), default=0),
        experts=_first_count(file.metadata.get(f"{architecture}.expert_count")),
        kv_sharing=heads // key_heads if key_heads else 1,
        tied="output.weight" not in file.tensors,
    )


def _first_count(value: MetadataValue | None) -> int:
    """An integer, or of an array with one for each layer the first that is not 0; else 0."""
    if isinstance(value, np.ndarray):
        return next((int(item) for item in value if item > 0), 0)
    return value if isinstance(value, int) and value > 0 else 0


def _check_place(source: Path, out: Path) -> None:
    if out.exists() and out.samefile(source):
        raise ConfigurationError(f"{out}: is the source itself; give the result another name.")
    if not out.parent.is_dir():
        raise ConfigurationError(f"{out}: there is no directory {out.parent}.")


def _check_unquantized(file: GGUFFile) -> None:
    for info in file.tensors.values():
        if info.type.block_elements > 1:
            raise ModelFileError(
                f"{file.path}: tensor `{info.name}` is {info.type.name}, quantised already, and "
                "would lose quality a second time; start from an f16, bf16 or f32 file, or allow "
                "requantising."
            )


def _planned(info: TensorInfo, recipe: str, facts: Facts) -> PlannedTensor:
    return PlannedTensor(info.name, info.shape, _target(info, recipe, facts))


def _target(info: TensorInfo, recipe: str, facts: Facts) -> str:
    """Integers stay; so do floats that the recipe leaves in two bytes, of whichever kind."""
    if info.type.name in _INTEGERS:
        return info.type.name
    wanted = tensor_type(recipe, info.name, info.shape, facts)
    if wanted == "F16" and info.type.name == "BF16" and not recipe_named(recipe).plain:
        return "BF16"
    return wanted


def _write(file: GGUFFile, tensor: PlannedTensor, output: GGUFOutput) -> Iterator[int]:
    """Append the tensor, a few rows at a time; yields the bytes of the source that each took."""
    source = file.weight(tensor.name)
    for chunk in _chunks(source.data, source.shape[-1]):
        if source.type.name == tensor.type:
            output.append(tensor.name, chunk)
        else:
            rows = dequantize(chunk, source.type)
            output.append(tensor.name, quantize(rows, tensor.type, tensor=tensor.name))
        yield chunk.numel()


def _chunks(data: Tensor, row: int) -> Iterator[Tensor]:
    """uint8 [..., row bytes] as [rows, row bytes], whose rows of `row` weights make up a chunk."""
    rows = data.view(-1, data.shape[-1]) if data.numel() else data.new_empty(0, data.shape[-1])
    count = max(_CHUNK // max(row, 1), 1)
    return (rows[begin : begin + count] for begin in range(0, max(len(rows), 1), count))


def _fields(file: GGUFFile, recipe: str) -> dict[str, Field]:
    """The file's metadata, each value with the type it had, and what is now true of the weights."""
    fields = {
        key: _field(value, file.kinds[key])
        for key, value in file.metadata.items()
        if key not in _LAYOUT_KEYS
    }
    fields["general.file_type"] = Field(file_type(recipe), GGUFValueType.UINT32)
    version = Field(_QUANTIZATION_VERSION, GGUFValueType.UINT32)
    fields["general.quantization_version"] = version
    return fields


def _field(value: MetadataValue, kind: int) -> Field:
    if isinstance(value, np.ndarray):
        return Field(value, GGUFValueType.ARRAY, _ELEMENTS[value.dtype])
    element = GGUFValueType.STRING if isinstance(value, list) else None
    return Field(value, GGUFValueType(kind), element)
