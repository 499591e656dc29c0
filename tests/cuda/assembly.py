"""Computes the kernels' inline PTX in Python, which Triton's interpreter cannot do."""

import re
from collections.abc import Callable
from typing import SupportsInt

import numpy as np

WORD = 0xFFFFFFFF


def run(assembly: str, word: int, *, results: int = 2) -> tuple[int, ...]:
    """$0, $1 and so on for the word after them, all 32 bits. KeyError for an instruction that is
    not known here."""
    registers = {f"${results}": word & WORD}
    body = re.sub(r"[{}]|\.reg [^;]*;", "", assembly)
    for line in filter(None, map(str.strip, body.split(";"))):
        name, operands = line.split(maxsplit=1)
        target, *sources = (operand.strip() for operand in operands.split(","))
        values = [registers[s] if s in registers else int(s, 0) for s in sources]
        registers[target] = int(OPERATIONS[name](*(value & WORD for value in values))) & WORD
    return tuple(registers[f"${number}"] for number in range(results))


def _bytes_chosen(a: int, b: int, selector: int) -> int:
    """`prmt`; the fourth bit of a nibble, which would replicate a sign, is not known."""
    both = a | b << 32
    nibbles = [selector >> 4 * byte & 15 for byte in range(4)]
    assert max(nibbles) < 8
    return sum((both >> 8 * nibble & 255) << 8 * byte for byte, nibble in enumerate(nibbles))


def _bfloat16_fma(a: int, b: int, c: int) -> int:
    """Of both halves; exact for products of powers of two, which is all that is computed here."""
    result = 0
    for shift in (0, 16):
        x, y, z = (np.uint32((part >> shift & 0xFFFF) << 16).view(np.float32) for part in (a, b, c))
        bits = int(np.float32(np.float64(x) * np.float64(y) + np.float64(z)).view(np.uint32))
        assert bits & 0xFFFF == 0
        result |= bits >> 16 << shift
    return result


OPERATIONS: dict[str, Callable[..., SupportsInt]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shr.u32": lambda a, b: a >> b,
    "add.u32": lambda a, b: a + b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "prmt.b32": _bytes_chosen,
    "fma.rn.bf16x2": _bfloat16_fma,
}
