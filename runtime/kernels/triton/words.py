"""Loads of aligned words and small numbers, and arithmetic on the four bytes of a word.

Pointers are to uint8. Triton's interpreter cannot run inline assembly, so functions with assembly
have a plain variant.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from runtime.quant.formats.codebooks import NONLINEAR as _NONLINEAR
from runtime.quant.formats.microscaling import E2M1 as _E2M1

ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)


def _table_words(values: tuple[int, ...]) -> tl.constexpr:
    """Sixteen signed bytes as four words."""
    packed = bytes(value & 255 for value in values)
    words = [packed[begin : begin + 4] for begin in range(0, len(packed), 4)]
    return tl.constexpr(tuple(int.from_bytes(word, "little") for word in words))


NONLINEAR = _table_words(_NONLINEAR)
E2M1 = _table_words(_E2M1)


@triton.jit
def one_byte(at):
    """A byte of a weight. Triton takes operands to be of the narrowest type in which a part of
    them was loaded, and makes their layout for it, so it does not see this load."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "ld.global.nc.u8 $0, [$1];", "=r,l", [at], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.load(at).to(tl.int32)


@triton.jit
def grid_word(at):
    """[n] pointers to int32 -> [n]. Triton does not see this load either, see `one_byte`: in a loop
    with tensor cores it would copy what is loaded through shared memory."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l", [at], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.load(at)


@triton.jit
def two_grid_words(at):
    """[n] pointers to int32 -> two [n]; see `grid_word`."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "ld.global.nc.v2.b32 {$0, $1}, [$2];",
            "=r,=r,l",
            [at],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        return tl.load(at), tl.load(at + 1)


@triton.jit
def short(at):
    """Two bytes, 0 to 65535."""
    return tl.load(at.to(tl.pointer_type(tl.uint16))).to(tl.int32)


@triton.jit
def half(bits):
    """A float16 from the lower bits of a word."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def halves(bits):
    """Two float16 from a word."""
    return half(bits), half(bits >> 16)


@triton.jit
def one_word(at):
    return tl.load(at.to(tl.pointer_type(tl.int32)))


@triton.jit
def two_words(at):
    """[n] pointers -> two [n], by one load."""
    words = at.to(tl.pointer_type(tl.int32))[:, None] + tl.arange(0, 2)[None, :]
    return tl.split(tl.load(words))


@triton.jit
def four_words(at):
    """[n] pointers -> four [n], by one load."""
    words = tl.load(at.to(tl.pointer_type(tl.int32))[:, None] + tl.arange(0, 4)[None, :])
    even, odd = tl.split(tl.reshape(words, [words.shape[0], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def dot(a, b, total):
    """total + the sum of four products of signed bytes."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [a, b, total],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        shifts = 24 - 8 * tl.arange(0, 4)[None, :]
        return total + tl.sum(((a[:, None] << shifts) >> 24) * ((b[:, None] << shifts) >> 24), 1)


@triton.jit
def multiplied(a, b, total):
    """total + a @ b; the interpreter multiplies the bits of bfloat16 instead of the numbers."""
    if ASSEMBLY:
        return tl.dot(a, b, total, input_precision="tf32x3")  # of float32
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")


@triton.jit
def finished(total):
    """The sums of `multiplied`, float32, once Hopper's tensor cores have read its operands: Triton
    waits for sums that are used. NVIDIA's assembler before 13.3 else takes registers of an operand
    for other values while tensor cores read them (triton-lang/triton#11781)."""
    if ASSEMBLY and cuda_capability_geq(9, 0) and not cuda_capability_geq(10, 0):
        return tl.inline_asm_elementwise(
            "", "=f,0", [total], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return total


@triton.constexpr_function
def _to_floats(signed: bool) -> str:
    """PTX: $4 -> $0 to $3. A byte below 0x4B0000 is a float32 of 2^23 plus the byte; 128 is added
    to signed bytes before."""
    moved = "xor.b32 w, $4, 0x80808080;" if signed else "mov.b32 w, $4;"
    floats = (f"prmt.b32 ${byte}, w, 0x4B000000, 0x765{byte};" for byte in range(4))
    return f"{{ .reg .b32 w; {moved} {' '.join(floats)} }}"


@triton.jit
def floats(word, OFFSET: tl.constexpr, SIGNED: tl.constexpr):
    """The four bytes of a word, the lowest first, minus OFFSET: exact, float32. Bytes that are not
    SIGNED are 0 to 127."""
    if ASSEMBLY:
        first, second, third, fourth = tl.inline_asm_elementwise(
            _to_floats(SIGNED),
            "=&f,=&f,=&f,=&f,r",
            [word],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
        zero: tl.constexpr = 8388608.0 + OFFSET + (128.0 if SIGNED else 0.0)
        return first - zero, second - zero, third - zero, fourth - zero
    else:
        return (
            ((word << 24 >> 24) - OFFSET).to(tl.float32),
            ((word << 16 >> 24) - OFFSET).to(tl.float32),
            ((word << 8 >> 24) - OFFSET).to(tl.float32),
            ((word >> 24) - OFFSET).to(tl.float32),
        )


@triton.jit
def stacked(values):
    """A power of two of tensors [n] -> [n, 2, 2, ...], whose elements are in the order of the
    tensors."""
    if len(values) == 1:
        return values[0]
    else:
        pairs = ()
        for number in tl.static_range(len(values) // 2):
            pairs = pairs + (tl.join(values[number], values[number + len(values) // 2]),)
        return stacked(pairs)


@triton.constexpr_function
def _lookup(table: tuple[int, ...]) -> str:
    """PTX: $2 -> $0, $1. `prmt` takes bytes by the lower three bits of each nibble of its third
    operand, so that the fourth chooses between two results."""
    return f"""{{
        .reg .b32 i, s, l, h;
        and.b32 i, $2, 0x77777777;
        shr.u32 s, $2, 1;
        and.b32 s, s, 0x44444444;
        or.b32 s, s, 0x32103210;
        prmt.b32 l, {table[0]}, {table[1]}, i;
        prmt.b32 h, {table[2]}, {table[3]}, i;
        prmt.b32 $0, l, h, s;
        shr.u32 i, i, 16;
        shr.u32 s, s, 16;
        prmt.b32 l, {table[0]}, {table[1]}, i;
        prmt.b32 h, {table[2]}, {table[3]}, i;
        prmt.b32 $1, l, h, s;
    }}"""


@triton.jit
def looked_up(packed, TABLE: tl.constexpr):
    """Eight nibbles, the lowest first -> two words with the bytes of the table that they index."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            _lookup(TABLE),
            "=&r,=&r,r",
            [packed],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        return _looked_up_plainly(packed, TABLE), _looked_up_plainly(packed >> 16, TABLE)


@triton.jit
def _looked_up_plainly(packed, TABLE: tl.constexpr):
    result = packed * 0
    for byte in tl.static_range(4):
        index = packed >> 4 * byte & 15
        low = tl.where(index < 4, TABLE[0], TABLE[1])
        high = tl.where(index < 12, TABLE[2], TABLE[3])
        word = tl.where(index < 8, low, high).to(tl.int64)
        result |= ((word >> index % 4 * 8) & 255).to(tl.int32) << 8 * byte
    return result


@triton.jit
def negated(word, signs):
    """Bytes above zero, negated where one of the lowest four bits of `signs` is set."""
    ones = ((signs & 15) * 0x00204081) & 0x01010101
    return (word ^ (ones * 255)) + ones


@triton.jit
def even_signs(index):
    """Seven signs, and an eighth that makes the number of negative ones even."""
    parity = index ^ (index >> 4)
    parity = parity ^ (parity >> 2)
    return index | (((parity ^ (parity >> 1)) & 1) << 7)


@triton.jit
def power_of_two(exponent):
    """2^(exponent - 128); the two smallest are denormal."""
    bits = tl.where(exponent < 2, (exponent + 1) << 21, (exponent - 1) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def small_float(byte):
    """Half of a float of type E4M3 without its sign; 0x7F is 0."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    normal = (((exponent + 119) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.0009765625, normal)
    return tl.where(byte == 0x7F, 0.0, value)
