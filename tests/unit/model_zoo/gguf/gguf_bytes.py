"""Writes GGUF files byte by byte, including invalid ones."""

import struct
from dataclasses import dataclass, field

U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value % (1 << 64))


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return u64(len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + u32(kind) + value


def array(kind: int, count: int, elements: bytes) -> bytes:
    return u32(kind) + u64(count) + elements


def tensor(
    name: str | bytes, dims: list[int], *, type: int = 0, offset: int = 0, count: int | None = None
) -> bytes:
    sizes = b"".join(map(u64, dims))
    return text(name) + u32(len(dims) if count is None else count) + sizes + u32(type) + u64(offset)


@dataclass
class Parts:
    """The parts of a file; `counts`: stated numbers of tensors and pairs, None: the true ones."""

    magic: bytes = b"GGUF"
    version: int = 3
    pairs: list[bytes] = field(
        default_factory=lambda: [pair("general.architecture", STRING, text("llama"))]
    )
    tensors: list[bytes] = field(default_factory=list)
    data: bytes = b""
    alignment: int = 32
    tensor_count: int | None = None
    pair_count: int | None = None

    def header(self) -> bytes:
        tensors = len(self.tensors) if self.tensor_count is None else self.tensor_count
        pairs = len(self.pairs) if self.pair_count is None else self.pair_count
        begin = self.magic + u32(self.version) + u64(tensors) + u64(pairs)
        return begin + b"".join(self.pairs) + b"".join(self.tensors)

    def bytes(self) -> bytes:
        header = self.header()
        return header + bytes(-len(header) % self.alignment) + self.data
