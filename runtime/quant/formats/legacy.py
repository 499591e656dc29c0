"""The first formats: blocks of 32 weights with one scale, and perhaps one minimum."""

from torch import Tensor

from runtime.quant.formats.bits import fields, fields_of_each, halves, signed


def q4_0(blocks: Tensor) -> Tensor:
    """Half scale, 16 bytes of nibbles: low ones are elements 0..15, high ones 16..31."""
    values = _nibbles(blocks[:, 2:]).view(-1, 32)
    return (signed(values) - 8).float().mul_(halves(blocks[:, :2]))


def q4_1(blocks: Tensor) -> Tensor:
    """Half scale, half minimum, nibbles as in Q4_0: weights are scale * value + minimum."""
    return _affine(blocks, _nibbles(blocks[:, 4:]))


def q5_0(blocks: Tensor) -> Tensor:
    """Half scale, four bytes with the fifth bits of elements 0..31, nibbles as in Q4_0."""
    values = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return (signed(values) - 16).float().mul_(halves(blocks[:, :2]))


def q5_1(blocks: Tensor) -> Tensor:
    """Half scale, half minimum, then as Q5_0; values count from 0."""
    return _affine(blocks, _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]))


def q8_0(blocks: Tensor) -> Tensor:
    """Half scale, 32 signed bytes."""
    return signed(blocks[:, 2:]).float().mul_(halves(blocks[:, :2]))


def _affine(blocks: Tensor, values: Tensor) -> Tensor:
    return values.float().mul_(halves(blocks[:, :2])).add_(halves(blocks[:, 2:4]))


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [n, 16] -> [n, 32]: the low nibbles, then the high ones."""
    return fields(packed.unsqueeze(1), 2, 4).reshape(-1, 32)


def _fifth_bits(packed: Tensor) -> Tensor:
    """uint8 [n, 4] -> [n, 32]: 16 where the bit is set."""
    return fields_of_each(packed, 8, 1) << 4
