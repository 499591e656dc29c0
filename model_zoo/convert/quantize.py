"""Quantises a GGUF file: keeps its metadata and converts its tensors to other block types."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from gguf import GGUFValueType

from model_zoo.convert.quantizers.rows import quantize, row_groups
from model_zoo.convert.recipes import Facts, facts_of_names, file_type, recipe_named, tensor_type
from model_zoo.convert.writer import GGUFOutput, MetadataField, PlannedTensor, gguf_output
from model_zoo.gguf.header import MetadataValue, TensorInfo
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.split import further_parts
from runtime.errors import ConfigurationError, ModelFileError
from runtime.quant.weight import dequantize

Progress = Callable[[int, int], None]

_QUANTIZATION_VERSION = 2
# Number of weights that are in memory as float32 at once; at least a row.
_CHUNK = 1 << 24
_INTEGERS = frozenset({"I8", "I16", "I32", "I64"})
# Keys that describe the source's files, not the model.
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
    """Quantises the model at `source`, which may be the first of split files, to `out`.

    `progress(done, total)` gets bytes of the source. `allow_requantize`: accept a quantised source,
    which loses quality again. Raises ConfigurationError or ModelFileError; `out` is then unchanged.
    """
    recipe_named(recipe)
    file = GGUFFile.open(source)
    _check_place([source, *further_parts(source, file.metadata)], out)
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
    """The facts that recipes depend on; absent keys count as 0."""
    architecture = file.metadata.get("general.architecture")
    key_heads = _first_count(file.metadata.get(f"{architecture}.attention.head_count_kv"))
    heads = _first_count(file.metadata.get(f"{architecture}.attention.head_count"))
    numbers = (_LAYER.match(name) for name in file.tensors)
    return facts_of_names(
        file.tensors,
        layers=max((int(number[1]) + 1 for number in numbers if number), default=0),
        experts=_first_count(file.metadata.get(f"{architecture}.expert_count")),
        kv_sharing=heads // key_heads if key_heads else 1,
    )


def _first_count(value: MetadataValue | None) -> int:
    """An integer, or the first nonzero one of an array with one per layer; else 0."""
    if isinstance(value, np.ndarray):
        counts = value.tolist() if value.dtype.kind in "iu" else ()
        return next((count for count in counts if count > 0), 0)
    return value if isinstance(value, int) and value > 0 else 0


def _check_place(sources: Sequence[Path], out: Path) -> None:
    if out.exists() and any(out.samefile(source) for source in sources):
        raise ConfigurationError(f"{out}: is the source itself; choose another name.")
    if not out.parent.is_dir():
        raise ConfigurationError(f"{out}: there is no directory {out.parent}.")


def _check_unquantized(file: GGUFFile) -> None:
    for info in file.tensors.values():
        if info.type.block_elements > 1:
            raise ModelFileError(
                f"{file.path}: tensor `{info.name}` is {info.type.name}, quantised already, and "
                "would lose quality again; start from an f16, bf16 or f32 file, or requantise it "
                "with `caravan quantize --allow-requantize`."
            )


def _planned(info: TensorInfo, recipe: str, facts: Facts) -> PlannedTensor:
    return PlannedTensor(info.name, info.shape, _target(info, recipe, facts))


def _target(info: TensorInfo, recipe: str, facts: Facts) -> str:
    """The new type. Integers are kept, and so is BF16 if the recipe stores the tensor as F16."""
    if info.type.name in _INTEGERS:
        return info.type.name
    wanted = tensor_type(recipe, info.name, info.shape, facts)
    if wanted == "F16" and info.type.name == "BF16" and not recipe_named(recipe).plain:
        return "BF16"
    return wanted


def _write(file: GGUFFile, tensor: PlannedTensor, output: GGUFOutput) -> Iterator[int]:
    """Appends the tensor a few rows at a time; yields the bytes of the source of each."""
    source = file.weight(tensor.name)
    for chunk in row_groups(source.data, most_elements=_CHUNK, row_elements=source.shape[-1]):
        if source.type.name == tensor.type:
            output.append(tensor.name, chunk)
        else:
            rows = dequantize(chunk, source.type)
            output.append(tensor.name, quantize(rows, tensor.type, tensor=tensor.name))
        yield chunk.numel()


def _fields(file: GGUFFile, recipe: str) -> dict[str, MetadataField]:
    """The file's metadata with unchanged value types, and the new file type.

    Empty arrays are left out: `gguf.GGUFWriter` cannot write them.
    """
    fields = {
        key: _field(value, file.kinds[key])
        for key, value in file.metadata.items()
        if key not in _LAYOUT_KEYS and not (isinstance(value, list | np.ndarray) and not len(value))
    }
    fields["general.file_type"] = MetadataField(file_type(recipe), GGUFValueType.UINT32)
    version = MetadataField(_QUANTIZATION_VERSION, GGUFValueType.UINT32)
    fields["general.quantization_version"] = version
    return fields


def _field(value: MetadataValue, kind: int) -> MetadataField:
    if isinstance(value, np.ndarray):
        return MetadataField(value.tolist(), GGUFValueType.ARRAY, _ELEMENTS[value.dtype])
    element = GGUFValueType.STRING if isinstance(value, list) else None
    return MetadataField(value, GGUFValueType(kind), element)
