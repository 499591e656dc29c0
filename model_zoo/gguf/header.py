"""The GGUF header: versions 2 and 3, every count and offset checked before use."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

import numpy as np
from gguf import GGMLQuantizationType

from model_zoo.gguf.cursor import Cursor
from runtime.errors import ModelFileError, UnsupportedModelError
from runtime.quant.block_types import BLOCK_TYPES, MXFP4_PAIRS, BlockType

# Arrays of numbers are read-only numpy arrays; arrays of texts are lists of str.
MetadataValue = int | float | bool | str | list[str] | np.ndarray

DEFAULT_ALIGNMENT = 32
# Limits of headers, several times the largest published models: about 100 keys, 10,000 tensors
# (experts stored one by one), 800,000 texts (tokens and merges) and 50 MB of metadata (a vocabulary
# and a whole tokenizer.json).
MAX_KEYS = 1 << 14
MAX_TENSORS = 1 << 16
MAX_TEXTS = 1 << 22
MAX_METADATA_BYTES = 128 << 20
MAX_DIMENSIONS = 4
MAX_KEY_BYTES = (1 << 16) - 1
MAX_NAME_BYTES = 63
_BOOL, _STRING, _ARRAY, _U32 = 7, 8, 9, 4
_NUMBERS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    _U32: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
# The architectures whose first files use MXFP4_PAIRS.
_GPT_OSS = ("gptoss", "gpt-oss")
_LEAST_PAIR_BYTES = 8 + 4 + 1
_LEAST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
_LEAST_STRING_BYTES = 8
_OTHER_FORMATS = {
    b"FUGG": "is a big-endian GGUF file; convert it to little-endian",
    b"lmgg": "is a GGML file, the format before GGUF; convert it to GGUF",
    b"fmgg": "is a GGMF file, a format before GGUF; convert it to GGUF",
    b"tjgg": "is a GGJT file, the format before GGUF; convert it to GGUF",
    b"algg": "is an old GGLA adapter file; convert it to GGUF",
    b"PK\x03\x04": "is a zip archive, perhaps a PyTorch checkpoint; convert it to GGUF",
    b"PK\x05\x06": "is an empty zip archive",
    b"<!DO": "is a web page, not a model; perhaps its download asks for a login",
    b"<!do": "is a web page, not a model; perhaps its download asks for a login",
    b"<htm": "is a web page, not a model; perhaps its download asks for a login",
}
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: `shape` in torch order, `begin` in bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    begin: int
    nbytes: int

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file, whose data begin at byte `data_begin`.

    kinds: the type number of each metadata value, including arrays that were skipped and are not
    in `metadata`.
    """

    version: int
    metadata: Mapping[str, MetadataValue]
    kinds: Mapping[str, int]
    tensors: Mapping[str, TensorInfo]
    data_begin: int


def read_header(cursor: Cursor, *, arrays: bool = True) -> Header:
    """Raises ModelFileError, which names the file, the problem and the limit.

    arrays: whether to keep the metadata's arrays; vocabularies take most of the time.
    """
    version = _version(cursor)
    tensor_count = _count(cursor, "tensors", _LEAST_TENSOR_BYTES, MAX_TENSORS)
    pair_count = _count(cursor, "metadata keys", _LEAST_PAIR_BYTES, MAX_KEYS)
    metadata: dict[str, MetadataValue] = {}
    kinds: dict[str, int] = {}
    alignment, texts_left = DEFAULT_ALIGNMENT, MAX_TEXTS
    with cursor.bounded(MAX_METADATA_BYTES, "the metadata"):
        for index in range(pair_count):
            key, kind = _key(cursor, index, kinds)
            kinds[key] = kind
            value = _value(cursor, kind, f"`{key}`", arrays, texts_left)
            texts_left -= len(value) if isinstance(value, list) else 0
            if arrays or kind != _ARRAY:
                metadata[key] = value
            if key == "general.alignment":
                alignment = _alignment(cursor, kind, value)
    named = metadata.get("general.architecture")
    gpt_oss = isinstance(named, str) and named in _GPT_OSS
    entries = [_Entry.read(cursor, index, gpt_oss) for index in range(tensor_count)]
    data_begin = _padded(cursor.position, alignment)
    tensors = _placed(cursor, entries, data_begin, alignment)
    stated = MappingProxyType(metadata), MappingProxyType(kinds)
    return Header(version, *stated, MappingProxyType(tensors), data_begin)


def _count(cursor: Cursor, things: str, least_bytes: int, most: int) -> int:
    count = cursor.count(f"the number of {things}", least_bytes=least_bytes)
    if count > most:
        raise cursor.error(f"it has {count:,} {things}; {most:,} is the limit")
    return count


def _version(cursor: Cursor) -> int:
    begin = cursor.peek(len(_LFS_POINTER))
    if not begin.startswith(b"GGUF"[: len(begin)]):
        raise _not_gguf(cursor, begin)
    cursor.u32("the magic number")
    version = cursor.u32("the version")
    if version and version & 0xFFFF == 0:
        raise cursor.error(_OTHER_FORMATS[b"FUGG"])
    if version not in (2, 3):
        raise cursor.error(f"its GGUF version is {version}; versions 2 and 3 can be read")
    return version


def _not_gguf(cursor: Cursor, begin: bytes) -> ModelFileError:
    if begin[8:9] == b"{":
        return cursor.error("is a safetensors file; convert it to GGUF")
    if begin == _LFS_POINTER:
        return cursor.error(
            "is a Git LFS pointer, not the model; fetch the file itself with `git lfs pull`"
        )
    magic = begin[:4]
    return cursor.error(_OTHER_FORMATS.get(magic, f"is not a GGUF file: it begins with {magic!r}"))


def _key(cursor: Cursor, index: int, seen: Mapping[str, int]) -> tuple[str, int]:
    key = cursor.identifier(f"metadata key {index}", most_bytes=MAX_KEY_BYTES)
    if not key:
        raise cursor.error(f"metadata key {index} is empty")
    if key in seen:
        raise cursor.error(f"metadata key `{key}` occurs twice")
    return key, cursor.u32(f"the type of `{key}`")


def _value(cursor: Cursor, kind: int, thing: str, arrays: bool, most_texts: int) -> MetadataValue:
    if kind in _NUMBERS:
        return cursor.scalar(_NUMBERS[kind], thing)
    if kind == _BOOL:
        return cursor.scalar(_NUMBERS[0], thing) != 0
    if kind == _STRING:
        return cursor.string(thing)
    if kind == _ARRAY:
        return _array(cursor, thing, wanted=arrays, most_texts=most_texts)
    raise cursor.error(f"{thing} has the unknown value type {kind}; types 0 to 12 exist")


def _array(cursor: Cursor, thing: str, *, wanted: bool, most_texts: int) -> list[str] | np.ndarray:
    """The array; empty if it is not `wanted`, but its size is checked in any case."""
    kind = cursor.u32(f"the element type of {thing}")
    if kind == _ARRAY:
        raise cursor.error(f"{thing} is an array of arrays, which GGUF does not allow")
    if kind not in _NUMBERS and kind not in (_BOOL, _STRING):
        raise cursor.error(f"{thing} has the unknown element type {kind}; types 0 to 12 exist")
    dtype = np.dtype(_NUMBERS[0 if kind in (_BOOL, _STRING) else kind].format)
    least_bytes = _LEAST_STRING_BYTES if kind == _STRING else dtype.itemsize
    count = cursor.count(f"the length of {thing}", least_bytes=least_bytes)
    if kind == _STRING:
        if count > most_texts:
            raise cursor.error(
                f"{thing} has {count:,} texts; {MAX_TEXTS:,} in all arrays is the limit"
            )
        return cursor.strings(count, thing, wanted=wanted)
    if not wanted:
        cursor.advance(count * dtype.itemsize, thing)
        return []
    numbers = cursor.numbers(dtype, count, thing)
    numbers = numbers != 0 if kind == _BOOL else numbers
    numbers.flags.writeable = False
    return numbers


def _alignment(cursor: Cursor, kind: int, value: MetadataValue) -> int:
    if kind != _U32:
        raise cursor.error(f"`general.alignment` has value type {kind}; it must be {_U32} (uint32)")
    assert isinstance(value, int)
    if value == 0 or value & (value - 1):
        raise cursor.error(f"`general.alignment` is {value}; it must be a power of two")
    return value


def _padded(count: int, alignment: int) -> int:
    return -(-count // alignment) * alignment


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor entry of the header; `offset` counts from the beginning of the data."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    offset: int
    nbytes: int

    @classmethod
    def read(cls, cursor: Cursor, index: int, gpt_oss: bool) -> "_Entry":
        name = cursor.identifier(f"the name of tensor {index}", most_bytes=MAX_NAME_BYTES)
        shape = _shape(cursor, name)
        type = _block_type(cursor, name, gpt_oss)
        row = shape[-1]
        if row % type.block_elements:
            raise cursor.error(
                f"tensor `{name}` has rows of {row:,} weights, not a multiple of the "
                f"{type.block_elements} in a block of {type.name}"
            )
        offset = cursor.u64(f"the offset of tensor `{name}`")
        return cls(name, shape, type, offset, prod(shape[:-1]) * type.row_bytes(row))


def _shape(cursor: Cursor, name: str) -> tuple[int, ...]:
    """The shape in torch order; the file lists the fastest varying dimension first."""
    count = cursor.u32(f"the number of dimensions of tensor `{name}`")
    if not 1 <= count <= MAX_DIMENSIONS:
        raise cursor.error(
            f"tensor `{name}` has {count:,} dimensions; 1 to {MAX_DIMENSIONS} are allowed"
        )
    sizes = [cursor.u64(f"the dimensions of tensor `{name}`") for _ in range(count)]
    for size in sizes:
        if size >= 1 << 63:
            raise cursor.error(
                f"tensor `{name}` has a negative dimension ({size - (1 << 64):,}); "
                "dimensions are 0 or more"
            )
    if prod(max(size, 1) for size in sizes) >= 1 << 63:
        raise cursor.error(
            f"tensor `{name}` has the dimensions {sizes}; 2^63 - 1 weights is the limit"
        )
    return tuple(reversed(sizes))


def _block_type(cursor: Cursor, name: str, gpt_oss: bool) -> BlockType:
    number = cursor.u32(f"the type of tensor `{name}`")
    if gpt_oss and number == MXFP4_PAIRS.id:
        return MXFP4_PAIRS
    if number in BLOCK_TYPES:
        return BLOCK_TYPES[number]
    known = {kind.value: kind.name for kind in GGMLQuantizationType}
    supported = ", ".join(type.name for type in BLOCK_TYPES.values())
    if number in known:
        raise UnsupportedModelError(
            f"{cursor.name}: tensor `{name}` has the type {known[number]}, which is not "
            f"supported; supported are {supported}."
        )
    raise UnsupportedModelError(
        f"{cursor.name}: tensor `{name}` has type id {number}, which is unknown or was removed "
        f"from GGUF; supported are {supported}."
    )


def _placed(
    cursor: Cursor, entries: list[_Entry], data_begin: int, alignment: int
) -> dict[str, TensorInfo]:
    """Checks that the tensors are contiguous, each padded to the alignment."""
    tensors: dict[str, TensorInfo] = {}
    expected = 0
    for entry in entries:
        if entry.name in tensors:
            raise cursor.error(f"tensor `{entry.name}` occurs twice")
        if entry.offset != expected:
            raise cursor.error(
                f"tensor `{entry.name}` begins at offset {entry.offset:,} of the data, but the "
                f"tensors before it end at {expected:,} (alignment {alignment})"
            )
        begin = data_begin + entry.offset
        if begin + entry.nbytes > cursor.size:
            raise cursor.error(
                f"tensor `{entry.name}` ends at byte {begin + entry.nbytes:,}, but the file has "
                f"only {cursor.size:,}; it is truncated"
            )
        tensors[entry.name] = TensorInfo(entry.name, entry.shape, entry.type, begin, entry.nbytes)
        expected = _padded(entry.offset + entry.nbytes, alignment)
    return tensors
