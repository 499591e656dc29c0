"""GGUF block formats as data: sizes, weights that stay quantised, and their meaning in float32.

The layouts are those of the GGUF format's `ggml` block types; the `gguf` package is the reference.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

from runtime.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class BlockType:
    """How `block_elements` consecutive weights of a row lie in `block_bytes` bytes of a file."""

    id: int
    name: str
    block_elements: int
    block_bytes: int

    def row_bytes(self, elements: int) -> int:
        """Bytes of a row of `elements` weights, a multiple of `block_elements`."""
        assert elements % self.block_elements == 0, (self.name, elements)
        return elements // self.block_elements * self.block_bytes


_TYPES = (
    BlockType(0, "F32", 1, 4),
    BlockType(1, "F16", 1, 2),
    BlockType(2, "Q4_0", 32, 18),
    BlockType(8, "Q8_0", 32, 34),
    BlockType(12, "Q4_K", 256, 144),
    BlockType(13, "Q5_K", 256, 176),
    BlockType(14, "Q6_K", 256, 210),
    BlockType(30, "BF16", 1, 2),
)
BLOCK_TYPES: Mapping[int, BlockType] = MappingProxyType({t.id: t for t in _TYPES})


def block_type(name: str) -> BlockType:
    """The block type of that GGUF name; `UnsupportedModelError` when there is none."""
    for candidate in _TYPES:
        if candidate.name == name:
            return candidate
    known = ", ".join(t.name for t in _TYPES)
    raise UnsupportedModelError(f"Block type {name} is not supported; supported are {known}.")


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A tensor in a file's own bytes.

    data uint8 [..., rows, row_bytes], possibly a read-only memory map; shape is the logical one in
    torch order, (..., out, in).
    """

    data: Tensor
    type: BlockType
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        expected = (*self.shape[:-1], self.type.row_bytes(self.shape[-1]))
        assert self.data.dtype == torch.uint8, self.data.dtype
        assert tuple(self.data.shape) == expected, (tuple(self.data.shape), expected)

    @property
    def nbytes(self) -> int:
        return prod(self.data.shape)

    def to(self, device: torch.device | str) -> "Weight":
        return replace(self, data=self.data.to(device))

    def dequantize(self) -> Tensor:
        """float32, of the logical shape; may share memory with `data` where the type is F32."""
        return dequantize(self.data, self.type)


def dequantize(data: Tensor, type: BlockType) -> Tensor:
    """uint8 [..., n * block_bytes] -> float32 [..., n * block_elements].

    Bit for bit what `gguf.quants.dequantize` gives. F32 comes back as a view of `data`.
    """
    if type.name in _PLAIN:
        return data.contiguous().view(_PLAIN[type.name]).float()
    blocks = data.reshape(-1, type.block_bytes)
    elements = data.shape[-1] // type.block_bytes * type.block_elements
    return _DEQUANTIZERS[type.name](blocks).reshape(*data.shape[:-1], elements)


def gather_rows(weight: Weight, ids: Tensor) -> Tensor:
    """weight (rows, in), ids [n] integer -> float32 [n, in]; the other rows stay untouched."""
    return dequantize(weight.data.index_select(0, ids), weight.type)


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _half(two_bytes: Tensor) -> Tensor:
    """uint8 [n, 2] -> float32 [n, 1]; cloned, since a view needs an even storage offset."""
    return two_bytes.clone(memory_format=torch.contiguous_format).view(torch.float16).float()


def _shifts(values: Tensor, count: int, step: int) -> Tensor:
    """uint8 [n, groups, width] -> [n, groups, count, width]: shifted right by 0, step, 2 step.."""
    by = torch.arange(0, count * step, step, dtype=torch.uint8, device=values.device)
    return values.unsqueeze(2) >> by.view(1, 1, -1, 1)


def _q4_0(blocks: Tensor) -> Tensor:
    """Half scale, 16 bytes of nibbles: low ones are elements 0..15, high ones 16..31."""
    nibbles = _shifts(blocks[:, None, 2:], 2, 4) & 0x0F
    return _half(blocks[:, :2]) * (nibbles.to(torch.int8) - 8).reshape(-1, 32).float()


def _q8_0(blocks: Tensor) -> Tensor:
    """Half scale, 32 signed bytes."""
    signed = blocks[:, 2:].clone(memory_format=torch.contiguous_format).view(torch.int8)
    return signed.float() * _half(blocks[:, :2])


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [n, 12] -> eight 6-bit scales and eight 6-bit minima, float32 [n, 8, 1] each."""
    low, minima, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = torch.cat([low & 0x3F, (high & 0x0F) | ((low >> 2) & 0x30)], dim=1)
    minimum = torch.cat([minima & 0x3F, (high >> 4) | ((minima >> 2) & 0x30)], dim=1)
    return scale.float().unsqueeze(2), minimum.float().unsqueeze(2)


def _k_affine(blocks: Tensor, values: Tensor) -> Tensor:
    """Halves d and dmin, 12 bytes of scales: weights are d * scale * value - dmin * minimum."""
    scale, minimum = _k_scales(blocks[:, 4:16])
    scale = _half(blocks[:, :2]).unsqueeze(2) * scale
    minimum = _half(blocks[:, 2:4]).unsqueeze(2) * minimum
    return scale * values.reshape(-1, 8, 32).float() - minimum


def _q4_k(blocks: Tensor) -> Tensor:
    """After the scales, four runs of 32 bytes, each two groups of 32: low nibbles, high nibbles."""
    return _k_affine(blocks, _shifts(blocks[:, 16:].view(-1, 4, 32), 2, 4) & 0x0F)


def _q5_k(blocks: Tensor) -> Tensor:
    """As Q4_K, with a fifth bit per weight in 32 bytes before the nibbles: bit g for group g."""
    high = _shifts(blocks[:, None, 16:48], 8, 1) & 1
    low = _shifts(blocks[:, 48:].view(-1, 4, 32), 2, 4) & 0x0F
    return _k_affine(blocks, low.reshape(-1, 8, 32) | (high.reshape(-1, 8, 32) << 4))


def _q6_k(blocks: Tensor) -> Tensor:
    """128 bytes of low nibbles, 64 of high bit pairs, 16 signed scales, a half."""
    low = _shifts(blocks[:, :128].view(-1, 2, 64), 2, 4) & 0x0F
    high = _shifts(blocks[:, 128:192].view(-1, 2, 32), 4, 2) & 0x03
    values = (low.reshape(-1, 8, 32) | (high.reshape(-1, 8, 32) << 4)).to(torch.int8) - 32
    signed = blocks[:, 192:208].clone(memory_format=torch.contiguous_format).view(torch.int8)
    scale = _half(blocks[:, 208:]) * signed.float()
    return scale.unsqueeze(2) * values.reshape(-1, 16, 16).float()


_DEQUANTIZERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
