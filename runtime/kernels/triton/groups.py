"""Groups of 32 weights of rows in planes, as words of four signed bytes with scales.

The planes are those of `runtime/quant/formats/planes.py`. Each thread has a group of its own, so
that all loads are as wide as a plane allows and nothing is exchanged between threads. A weight is
scale * (byte - offset) - minimum, with one scale and minimum for each half of the group; in float32
it has the bits of `runtime/quant/formats`, where products are not fused with sums.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.triton.words import (
    E2M1,
    NONLINEAR,
    even_signs,
    four_words,
    grid_word,
    half,
    halves,
    looked_up,
    negated,
    one_byte,
    one_word,
    power_of_two,
    short,
    small_float,
    two_grid_words,
    two_words,
)
from runtime.quant.formats.grids import GRIDS, load_grid


@dataclass(frozen=True)
class Form:
    """How a type's weights follow from words. `offset`: of the bytes; `minima`: whether there are
    any; `halved`: whether each half of a group has its own scale; `grid`: the type's codebook."""

    offset: int = 0
    minima: bool = False
    halved: bool = False
    grid: str | None = None


FORMS = {
    "Q4_0": Form(offset=8),
    "Q4_1": Form(minima=True),
    "Q5_0": Form(offset=16),
    "Q5_1": Form(minima=True),
    "Q8_0": Form(),
    "Q2_K": Form(minima=True, halved=True),
    "Q3_K": Form(offset=4, halved=True),
    "Q4_K": Form(minima=True),
    "Q5_K": Form(minima=True),
    "Q6_K": Form(offset=32, halved=True),
    "IQ4_NL": Form(),
    "IQ4_XS": Form(),
    "MXFP4": Form(),
    "MXFP4_PAIRS": Form(),
    "NVFP4": Form(halved=True),
    "TQ1_0": Form(offset=1),
    "TQ2_0": Form(offset=1),
    "IQ2_XXS": Form(grid="IQ2_XXS"),
    "IQ2_XS": Form(halved=True, grid="IQ2_XS"),
    "IQ2_S": Form(halved=True, grid="IQ2_S"),
    "IQ3_XXS": Form(grid="IQ3_XXS"),
    "IQ3_S": Form(grid="IQ3_S"),
    "IQ1_S": Form(offset=9, grid="IQ1_S"),
    "IQ1_M": Form(offset=9, halved=True, grid="IQ1_S"),
}


@triton.constexpr_function
def offset_of(type: str) -> int:
    return FORMS[type].offset


@triton.constexpr_function
def has_minima(type: str) -> bool:
    return FORMS[type].minima


@triton.constexpr_function
def is_halved(type: str) -> bool:
    return FORMS[type].halved


@triton.constexpr_function
def is_signed(type: str) -> bool:
    """Else the bytes are 0 to 127."""
    return not FORMS[type].offset and not FORMS[type].minima


@triton.constexpr_function
def among(type: str, names: str) -> bool:
    return type in names.split()


@cache
def grid_of(type: str, device: torch.device) -> Tensor | None:
    """int32 [words]: the codebook of the type, if any, with four weights per word.

    Ternary grids have 8 * weight + 9, so that an eighth can be added or subtracted in bytes.
    """
    name = FORMS[type].grid
    if name is None:
        return None
    weights = load_grid(name, torch.device("cpu"))
    weights = weights * 8 + 9 if min(GRIDS[name].levels) < 0 else weights
    return weights.to(torch.uint8).view(torch.int32).flatten().to(device)


@triton.jit
def group(row, g, groups, grid, TYPE: tl.constexpr):
    """row: uint8 pointer or pointers [n]; g int32 [n] of the `groups` of a row.

    -> eight words, the scales of both halves, their minima; each [n].
    """
    return unpacked(packed(row, g, groups, TYPE), g, grid, TYPE)


@triton.jit
def packed(row, g, groups, TYPE: tl.constexpr):
    """What `unpacked` takes, as it is in memory: so few registers hold weights of later groups."""
    if among(TYPE, "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0"):
        return _packed_legacy(row, g, groups, TYPE)
    elif among(TYPE, "Q2_K Q3_K Q4_K Q5_K Q6_K"):
        return _packed_k_quant(row, g, groups // 8, TYPE)
    elif among(TYPE, "IQ4_NL IQ4_XS MXFP4 MXFP4_PAIRS NVFP4"):
        return _packed_table(row, g, groups, TYPE)
    elif among(TYPE, "IQ2_XXS IQ2_XS IQ2_S"):
        return _packed_two_bits(row, g, groups // 8, TYPE)
    elif among(TYPE, "IQ3_XXS IQ3_S"):
        return _packed_three_bits(row, g, groups // 8, TYPE)
    elif among(TYPE, "IQ1_S IQ1_M"):
        return _packed_one_bit(row, g, groups // 8, TYPE)
    else:
        return _packed_ternary(row, g, groups // 8, TYPE)


@triton.jit
def unpacked(packed, g, grid, TYPE: tl.constexpr):
    """As `group`."""
    if among(TYPE, "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0"):
        return _legacy(packed, TYPE)
    elif among(TYPE, "Q2_K Q3_K Q4_K Q5_K Q6_K"):
        return _k_quant(packed, g, TYPE)
    elif among(TYPE, "IQ4_NL IQ4_XS MXFP4 MXFP4_PAIRS NVFP4"):
        return _table(packed, g, TYPE)
    elif among(TYPE, "IQ2_XXS IQ2_XS IQ2_S"):
        return _two_bits(packed, grid, TYPE)
    elif among(TYPE, "IQ3_XXS IQ3_S"):
        return _three_bits(packed, g, grid, TYPE)
    elif among(TYPE, "IQ1_S IQ1_M"):
        return _one_bit(packed, g, grid, TYPE)
    else:
        return _ternary(packed, g, TYPE)


@triton.jit
def _packed_legacy(row, g, groups, TYPE: tl.constexpr):
    if TYPE == "Q8_0":
        words = four_words(row + g * 32) + four_words(row + g * 32 + 16)
        rest = row + groups * 32
    else:
        words = four_words(row + g * 16)
        rest = row + groups * 16
    if among(TYPE, "Q5_0 Q5_1"):
        bits = one_word(rest + g * 4)
        rest += groups * 4
    else:
        bits = ()
    return words, bits, one_word(rest + g * 4) if has_minima(TYPE) else short(rest + g * 2)


@triton.jit
def _legacy(packed, TYPE: tl.constexpr):
    words, bits, ends = packed
    if TYPE != "Q8_0":
        words = _nibbles(words)
    if among(TYPE, "Q5_0 Q5_1"):
        words = _with_bits(words, bits, 4)
    if has_minima(TYPE):
        scale, minimum = halves(ends)
        return words, (scale, scale), (-minimum, -minimum)
    else:
        scale = half(ends)
        return words, (scale, scale), (scale, scale)


@triton.jit
def _packed_k_quant(row, g, blocks, TYPE: tl.constexpr):
    block = g // 8
    if among(TYPE, "Q2_K Q3_K"):
        words = two_words(row + g * 8)
        rest = row + blocks * 64
    else:
        words = four_words(row + g * 16)
        rest = row + blocks * 128
    bits = ()
    if among(TYPE, "Q3_K Q5_K"):
        bits = (one_word(rest + g * 4),)
        rest += blocks * 32
    elif TYPE == "Q6_K":
        bits = two_words(rest + g * 8)
        rest += blocks * 64
    if among(TYPE, "Q2_K Q6_K"):
        numbers = (short(rest + g * 2),)
        rest += blocks * 16
    else:
        numbers = (one_byte(rest + g), one_byte(rest + blocks * 8 + g // 2))
        rest += blocks * 12
    ends = one_word(rest + block * 4) if has_minima(TYPE) else short(rest + block * 2)
    return words, bits, numbers, ends


@triton.jit
def _k_quant(packed, g, TYPE: tl.constexpr):
    words, bits, numbers, ends = packed
    words = _pairs(words) if among(TYPE, "Q2_K Q3_K") else _nibbles(words)
    if among(TYPE, "Q3_K Q5_K"):
        words = _with_bits(words, bits[0], 2 if TYPE == "Q3_K" else 4)
    elif TYPE == "Q6_K":
        words = _with_pairs(words, bits)
    if TYPE == "Q2_K":
        both, whole = numbers[0], halves(ends)
        scales = (whole[0] * (both & 15).to(tl.float32), whole[0] * (both >> 8 & 15).to(tl.float32))
        lows = (both >> 4 & 15).to(tl.float32), (both >> 12 & 15).to(tl.float32)
        return words, scales, (whole[1] * lows[0], whole[1] * lows[1])
    elif TYPE == "Q6_K":
        both, whole = numbers[0], half(ends)
        first, second = (both << 24) >> 24, (both << 16) >> 24
        scales = (whole * first.to(tl.float32), whole * second.to(tl.float32))
        return words, scales, scales
    else:
        low, high = numbers[0], numbers[1] >> (g % 2 * 4)
        first = (low & 15) | ((high & 3) << 4)
        second = (low >> 4) | ((high >> 2 & 3) << 4)
        if TYPE == "Q3_K":
            whole = half(ends)
            scales = (whole * (first - 32).to(tl.float32), whole * (second - 32).to(tl.float32))
            return words, scales, scales
        else:
            whole, least = halves(ends)
            scale, minimum = whole * first.to(tl.float32), least * second.to(tl.float32)
            return words, (scale, scale), (minimum, minimum)


@triton.jit
def _packed_table(row, g, groups, TYPE: tl.constexpr):
    words = four_words(row + g * 16)
    rest = row + groups * 16
    if among(TYPE, "NVFP4 IQ4_NL"):
        return words, (short(rest + g * 2),)
    elif TYPE == "IQ4_XS":
        blocks = groups // 8
        low, high = one_byte(rest + g // 2), one_byte(rest + blocks * 4 + g // 4)
        return words, (low, high, short(rest + blocks * 6 + g // 8 * 2))
    else:
        return words, (one_byte(rest + g),)


@triton.jit
def _table(packed, g, TYPE: tl.constexpr):
    nibbles, numbers = packed
    table: tl.constexpr = NONLINEAR if among(TYPE, "IQ4_NL IQ4_XS") else E2M1
    words = looked_up(nibbles[0], table) + looked_up(nibbles[1], table)
    words = words + looked_up(nibbles[2], table) + looked_up(nibbles[3], table)
    if TYPE == "NVFP4":
        scales = (small_float(numbers[0] & 255), small_float(numbers[0] >> 8))
        return words, scales, scales
    else:
        if TYPE == "IQ4_NL":
            scale = half(numbers[0])
        elif TYPE == "IQ4_XS":
            low, high = numbers[0] >> (g % 2 * 4), numbers[1] >> (g % 4 * 2)
            number = ((low & 15) | ((high & 3) << 4)) - 32
            scale = half(numbers[2]) * number.to(tl.float32)
        else:
            scale = power_of_two(numbers[0])
        return words, (scale, scale), (scale, scale)


@triton.jit
def _packed_two_bits(row, g, blocks, TYPE: tl.constexpr):
    if TYPE == "IQ2_S":
        index = one_word(row + g * 4), one_word(row + blocks * 32 + g * 4)
        high = one_byte(row + blocks * 64 + g)
        rest = row + blocks * 72
    else:
        index = two_words(row + g * 8)
        high = index[0]
        rest = row + blocks * 64
    if TYPE == "IQ2_XXS":
        return index, high, (short(rest + g // 8 * 2),)
    else:
        return index, high, (one_byte(rest + g), short(rest + blocks * 8 + g // 8 * 2))


@triton.jit
def _two_bits(packed, grid, TYPE: tl.constexpr):
    both, high, numbers = packed
    index, signs = both
    words = ()
    for part in tl.static_range(4):
        if TYPE == "IQ2_S":
            place = (index >> 8 * part & 255) | ((high >> 2 * part & 3) << 8)
            sign = signs >> 8 * part
        elif TYPE == "IQ2_XS":
            both = (index if part < 2 else signs) >> part % 2 * 16
            place, sign = both & 511, even_signs(both >> 9 & 127)
        else:
            place, sign = index >> 8 * part & 255, even_signs(signs >> 7 * part & 127)
        first, second = two_grid_words(grid + place * 2)
        words = words + (negated(first, sign), negated(second, sign >> 4))
    if TYPE == "IQ2_XXS":
        scale = half(numbers[0]) * ((signs >> 28 & 15).to(tl.float32) + 0.5) * 0.25
        return words, (scale, scale), (scale, scale)
    else:
        whole = half(numbers[1])
        first = whole * ((numbers[0] & 15).to(tl.float32) + 0.5) * 0.25
        second = whole * ((numbers[0] >> 4).to(tl.float32) + 0.5) * 0.25
        return words, (first, second), (first, second)


@triton.jit
def _packed_three_bits(row, g, blocks, TYPE: tl.constexpr):
    index = two_words(row + g * 8)
    signs = one_word(row + blocks * 64 + g * 4)
    rest = row + blocks * 96
    if TYPE == "IQ3_S":
        numbers = (one_byte(rest + g), one_byte(rest + blocks * 8 + g // 2))
        return index, signs, numbers, short(rest + blocks * 12 + g // 8 * 2)
    else:
        return index, signs, (signs,), short(rest + g // 8 * 2)


@triton.jit
def _three_bits(packed, g, grid, TYPE: tl.constexpr):
    index, signs, numbers, ends = packed
    words = ()
    for part in tl.static_range(4):
        both = index[part // 2] >> part % 2 * 16
        first, second = both & 255, both >> 8 & 255
        if TYPE == "IQ3_S":
            first |= (numbers[0] >> 2 * part & 1) << 8
            second |= (numbers[0] >> 2 * part + 1 & 1) << 8
            sign = signs >> 8 * part
        else:
            sign = even_signs(signs >> 7 * part & 127)
        words = words + (negated(grid_word(grid + first), sign),)
        words = words + (negated(grid_word(grid + second), sign >> 4),)
    if TYPE == "IQ3_S":
        number = numbers[1] >> (g % 2 * 4) & 15
        scale = half(ends) * (number * 2 + 1).to(tl.float32)
    else:
        scale = half(ends) * ((signs >> 28 & 15).to(tl.float32) + 0.5) * 0.5
    return words, (scale, scale), (scale, scale)


@triton.jit
def _packed_one_bit(row, g, blocks, TYPE: tl.constexpr):
    index, more = one_word(row + g * 4), short(row + blocks * 32 + g * 2)
    rest = row + blocks * 48
    if TYPE == "IQ1_S":
        return index, more, (short(rest + g // 8 * 2),)
    else:
        return index, more, two_words(rest + g // 8 * 8)


@triton.jit
def _one_bit(packed, g, grid, TYPE: tl.constexpr):
    """Bytes are eight times a weight and one more or less, so scales are divided by eight."""
    index, more, ends = packed
    words = ()
    for part in tl.static_range(4):
        if TYPE == "IQ1_S":
            upper, minus = more >> 3 * part & 7, more >> 15 & 1
        else:
            upper, minus = more >> 4 * part & 7, more >> 4 * part + 3 & 1
        place = (index >> 8 * part & 255) | (upper << 8)
        first, second = two_grid_words(grid + place * 2)
        shift = (1 - 2 * minus) * 0x01010101
        words = words + (first + shift, second + shift)
    if TYPE == "IQ1_S":
        scale = half(ends[0]) * ((more >> 12 & 7) * 2 + 1).to(tl.float32) * 0.125
        return words, (scale, scale), (scale, scale)
    else:
        low, high = ends
        bits = (low >> 12 & 15) | (low >> 24 & 0xF0) | (high >> 4 & 0xF00) | (high >> 16 & 0xF000)
        whole = half(bits) * 0.125
        four = tl.where(g % 8 < 4, low, high) >> (g % 4 // 2 * 16 + g % 2 * 6)
        first = whole * ((four & 7) * 2 + 1).to(tl.float32)
        second = whole * ((four >> 3 & 7) * 2 + 1).to(tl.float32)
        return words, (first, second), (first, second)


@triton.jit
def _packed_ternary(row, g, blocks, TYPE: tl.constexpr):
    block = g // 8
    if TYPE == "TQ2_0":
        return two_words(row + g * 8), short(row + blocks * 64 + block * 2)
    else:
        words = ()
        for part in tl.static_range(8):
            words = words + (_byte_words(row + block * 52, g % 8, part),)
        return words, short(row + blocks * 52 + block * 2)


@triton.jit
def _ternary(packed, g, TYPE: tl.constexpr):
    packed_words, ends = packed
    if TYPE == "TQ2_0":
        words = _pairs(packed_words)
    else:
        words = ()
        for part in tl.static_range(8):
            words = words + (_digits(packed_words[part], g % 8, part),)
    scale = half(ends)
    return words, (scale, scale), (scale, scale)


@triton.jit
def _byte_words(block, g, PART: tl.constexpr):
    """Four bytes of a block of TQ1_0, with one digit each of a group."""
    end = 32 + PART * 4 if PART < 4 else 48
    return one_word(block + tl.where(g < 5, PART * 4, tl.where(g < 7, 32 + PART % 4 * 4, end)))


@triton.jit
def _digits(word, g, PART: tl.constexpr):
    """Four digits of a block of TQ1_0: one digit each of four bytes."""
    last = 4 if PART < 4 else PART - 4
    digit = tl.where(g < 5, g, tl.where(g < 7, 2 * g - 10 + PART // 4, last))
    power = tl.where(digit == 4, 81, 0x1B090301 >> (digit % 4 * 8) & 255)
    even = ((((word & 0x00FF00FF) * power) & 0x00FF00FF) * 3) >> 8 & 0x00FF00FF
    odd = ((((word >> 8 & 0x00FF00FF) * power) & 0x00FF00FF) * 3) & 0x03000300
    return even | odd


@triton.jit
def _nibbles(words):
    """Low nibbles are the first half of a group."""
    a, b, c, d = words
    mask: tl.constexpr = 0x0F0F0F0F
    low = (a & mask, b & mask, c & mask, d & mask)
    return low + ((a >> 4) & mask, (b >> 4) & mask, (c >> 4) & mask, (d >> 4) & mask)


@triton.jit
def _pairs(two):
    words = ()
    for part in tl.static_range(8):
        words = words + ((two[part // 4] >> part % 4 * 2) & 0x03030303,)
    return words


@triton.jit
def _with_pairs(words, two):
    """Two more bits per weight, above the lower four."""
    result = ()
    for part in tl.static_range(8):
        word = two[part // 4]
        moved = word << 4 - part % 4 * 2 if part % 4 < 3 else word >> 2
        result = result + (words[part] | (moved & 0x30303030),)
    return result


@triton.jit
def _with_bits(words, bits, PLACE: tl.constexpr):
    """One more bit per weight, at bit PLACE."""
    result = ()
    for part in tl.static_range(8):
        moved = bits << PLACE - part if part <= PLACE else bits >> part - PLACE
        result = result + (words[part] | (moved & (0x01010101 << PLACE)),)
    return result
