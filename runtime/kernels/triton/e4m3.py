"""Floats of type E4M3 in bytes, converted by integer arithmetic.

Triton converts them on devices from compute capability 8.9 on only. They have a sign, four bits of
exponent with a bias of 7, three of mantissa, no infinities, and NaN for 0x7F and 0xFF.
"""

import triton
import triton.language as tl

from runtime.kernels.triton.words import ASSEMBLY

# PTX: four E4M3 in $2 -> four bfloat16 in $0, $1. The bits of a number go to those of one that is
# 2^-120 times as large, which may be subnormal. Adding 1 to its mantissa carries if it is NaN; then
# its exponent becomes that of NaN. The sum with -0 is a product, which bfloat16 lacks before 9.0.
TO_BFLOAT16 = tl.constexpr(
    "{.reg .b32 a, b, n, s, z;"
    "mov.b32 s, 0x7B807B80;"
    "mov.b32 z, 0x80008000;"
    + "".join(
        f"prmt.b32 a, $2, 0, {bytes};"
        "shr.u32 b, a, 4;"
        "and.b32 b, b, 0x07F007F0;"
        "add.u32 n, b, 0x00100010;"
        "and.b32 n, n, 0x08000800;"
        "mad.lo.u32 b, n, 15, b;"
        "and.b32 a, a, 0x80008000;"
        "or.b32 a, a, b;"
        f"fma.rn.bf16x2 {result}, a, s, z;"
        for bytes, result in (("0x1404", "$0"), ("0x3424", "$1"))
    )
    + "}"
)


@triton.jit
def from_e4m3(code):
    """uint8 -> the same number in bfloat16, or in float32 where no assembly is known."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            TO_BFLOAT16,
            "=&r,=&r,r",
            [code],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        size = code.to(tl.int32) & 0x7F
        bits = (code.to(tl.int32) & 0x80) << 24 | size << 20
        number = bits.to(tl.float32, bitcast=True) * 2.0**120
        return tl.where(size == 0x7F, float("nan"), number)


@triton.jit
def to_e4m3(x):
    """float32, NaN or at most 448 in magnitude -> uint8, rounded to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (size - (120 << 23) + 0x7FFFF + (size >> 20 & 1)) >> 20
    # In a sum with 2^14, the last bit is worth 2^-9, the smallest subnormal.
    small = size.to(tl.float32, bitcast=True) + 16384.0
    small = small.to(tl.int32, bitcast=True) - (141 << 23)
    code = tl.where(size < 121 << 23, small, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | (bits >> 24 & 0x80)).to(tl.uint8)
