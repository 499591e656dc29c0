"""Random blocks of every type, and the offsets of scales in blocks."""

import numpy as np

from runtime.quant.block_types import BlockType

# Byte offsets of the half-precision scales in a block.
HALF_OFFSETS = {
    "F16": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ1_S": (0,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
# Four words whose upper nibbles make up the half of a block, the lowest first.
SCATTERED_HALF = {"IQ1_M": 48}
# Offsets of scales that are floats of eight bits, and the ends of their ranges; no weight of a
# block of MXFP4 with a larger exponent than these fits in a float32.
SMALL_FLOATS = {
    "MXFP4": ((0,), (0, 1, 2, 127, 251)),
    "NVFP4": ((0, 1, 2, 3), (0x00, 0x01, 0x07, 0x08, 0x7E, 0x7F, 0x80, 0xFF)),
}
NUMBERS = {"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64, "F64": np.float64}
EXTREMES = np.array([0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 1.0, -1.0, 65504.0, -65504.0], np.float16)


def random_blocks(
    type: BlockType, shape: tuple[int, ...], *, random: np.random.Generator | None = None
) -> np.ndarray:
    """Every bit pattern except infinities and NaNs, often with an extreme scale.

    `shape` counts blocks in its last place.
    """
    draw = random or np.random.default_rng(0)
    if type.name == "F64":
        return (draw.normal(size=shape) * 10.0 ** draw.integers(-44, 38, shape)).view(np.uint8)
    data = draw.integers(0, 256, (*shape, type.block_bytes), dtype=np.uint8)
    if type.name in ("F32", "BF16"):
        data[..., -1] &= 0xBF  # below 2: neither infinity nor NaN, denormals included
    for offset in half_offsets(type):
        ordinary = draw.integers(0, 1 << 16, shape, dtype=np.uint16) & 0xBBFF
        extreme = draw.choice(EXTREMES, shape)
        chosen = draw.random(shape) < 0.3
        set_half(data, type, offset, np.where(chosen, extreme, ordinary.view(np.float16)))
    offsets, extremes = SMALL_FLOATS.get(type.name, ((), (0,)))
    for offset in offsets:
        chosen = (draw.random(shape) < 0.3) | (data[..., offset] > max(extremes))
        data[..., offset] = np.where(chosen, draw.choice(extremes, shape), data[..., offset])
    return data.reshape(*shape[:-1], shape[-1] * type.block_bytes)


def set_scales(
    data: np.ndarray,
    type: BlockType,
    scale: float | np.ndarray,
    *,
    minimum: float | np.ndarray | None = None,
) -> None:
    """Set the halves of the blocks in data [..., n * block_bytes]; minima like scales, or given."""
    blocks = data.reshape(-1, type.block_bytes)
    minimum = scale if minimum is None else minimum
    for offset, value in zip(half_offsets(type), (scale, minimum), strict=False):
        set_half(blocks, type, offset, np.broadcast_to(value, len(blocks)))


def set_half(blocks: np.ndarray, type: BlockType, offset: int, values: np.ndarray) -> None:
    """Put float16 [...] into the scale at `offset` of uint8 blocks [..., block_bytes]."""
    bits = values.astype(np.float16).view(np.uint16)
    if type.name in SCATTERED_HALF:
        for nibble in range(4):
            upper = (bits >> (4 * nibble) & 15).astype(np.uint8) << 4
            at = offset + 2 * nibble + 1
            blocks[..., at] = blocks[..., at] & 0x0F | upper
    else:
        blocks[..., offset] = bits & 0xFF
        blocks[..., offset + 1] = bits >> 8


def half_offsets(type: BlockType) -> tuple[int, ...]:
    if type.name in SCATTERED_HALF:
        return (SCATTERED_HALF[type.name],)
    return HALF_OFFSETS.get(type.name, ())
