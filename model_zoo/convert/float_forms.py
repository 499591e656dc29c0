"""Forms of 8-bit weights with scales, and of 4-bit floats."""

import torch
from torch import Tensor

from model_zoo.convert.packed_weights import four_bit_floats
from model_zoo.convert.scaled_weights import Block, Shape, fits, scaled, spread
from model_zoo.convert.stored_blocks import (
    are_halves,
    mxfp4_rows,
    nvfp4_rows,
    q8_0_rows,
    scales_blocks,
)
from model_zoo.convert.weight_forms import (
    EIGHT_BIT_FLOATS,
    EXPONENTS,
    FLOATS,
    Blocks,
    Parts,
    Tensors,
    WeightForm,
)

_BYTES = frozenset({"U8"})
# How many columns share a scale in NVFP4 and MXFP4, and how many a block of NVFP4 has in GGUF.
_NVFP4_COLUMNS, _MXFP4_COLUMNS, _NVFP4_BLOCK = 16, 32, 64


def scaled_form(scale: str, block: Block | None, *, end: str = "", parts: int = 1) -> WeightForm:
    """8-bit floats or integers with scales as in `fits`; integers may have zero points.

    scale: the suffix of the scales. end: the suffix of the weights that have this form. parts: how
    many equal parts of their rows are divided into blocks separately.
    """

    def shape(tensors: Parts) -> Shape | None:
        whole = tensors[end].shape
        others = [part.shape for name, part in tensors.items() if name != end]
        return whole if all(fits(whole, other, block, parts) for other in others) else None

    def numbers(tensors: Tensors) -> Tensor:
        weight = tensors[end]
        if zero_point in tensors:
            zero = spread(tensors[zero_point].float(), weight.shape, block, parts)
            weight = weight.float() - zero
        return scaled(weight, tensors[end + scale], block, parts)

    def exact(tensors: Parts) -> bool:
        symmetric = tensors[end].dtype == "I8" and zero_point not in tensors
        stated = tensors[end + scale]
        fitting = symmetric and scales_blocks(stated.shape, tensors[end].shape)
        return fitting and are_halves(stated.read())

    zero_point = f"{end}_zero_point"
    return WeightForm(
        needed={end: EIGHT_BIT_FLOATS | {"I8"}, end + scale: FLOATS | EXPONENTS},
        optional={zero_point: frozenset({"I8"})},
        shape=shape,
        numbers=numbers,
        weight=end,
        sliced=True,
        blocks=Blocks("Q8_0", exact, lambda tensors: q8_0_rows(tensors[end], tensors[end + scale])),
    )


def mxfp4_form(packed: str) -> WeightForm:
    """E2M1, two in a byte of a row, with an exponent per 32 columns. packed: the suffix of the
    bytes."""
    return WeightForm(
        needed={packed: _BYTES, "_scale": EXPONENTS},
        shape=lambda parts: _columns(parts, packed, _MXFP4_COLUMNS),
        numbers=lambda parts: scaled(four_bit_floats(parts[packed]), parts["_scale"]),
        blocks=Blocks(
            "MXFP4",
            lambda parts: True,
            lambda parts: mxfp4_rows(parts[packed], parts["_scale"].view(torch.uint8)),
        ),
    )


def nvfp4_form(packed: str, factor: str, *, divides: bool = False) -> WeightForm:
    """E2M1, two in a byte of a row, with an E4M3 scale per 16 columns and one factor, which
    multiplies or `divides`. packed, factor: the suffixes of the bytes and of the factor."""

    def shape(parts: Parts) -> Shape | None:
        single = parts[factor].shape in ((), (1,))
        return _columns(parts, packed, _NVFP4_COLUMNS) if single else None

    def multiplier(stored: Tensor) -> Tensor:
        number = stored.float().reshape(1)
        return 1 / number if divides else number

    return WeightForm(
        needed={packed: _BYTES, "_scale": EIGHT_BIT_FLOATS, factor: FLOATS},
        shape=shape,
        numbers=lambda parts: (
            scaled(four_bit_floats(parts[packed]), parts["_scale"]) * multiplier(parts[factor])
        ),
        blocks=Blocks(
            "NVFP4",
            lambda parts: 2 * parts[packed].shape[-1] % _NVFP4_BLOCK == 0,
            lambda parts: nvfp4_rows(parts[packed], parts["_scale"]),
            lambda parts: multiplier(parts[factor].read()),
        ),
    )


def _columns(parts: Parts, packed: str, group: int) -> Shape | None:
    """The shape [out, in] of weights that are stored two in a byte, with a scale per `group`
    columns."""
    stored = parts[packed].shape
    if len(stored) != 2 or 2 * stored[1] % group:
        return None
    shape = (stored[0], 2 * stored[1])
    return shape if parts["_scale"].shape == (stored[0], shape[1] // group) else None
