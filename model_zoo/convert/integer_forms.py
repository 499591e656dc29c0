"""Forms of weights as integers of few bits with scales: compressed-tensors, GPTQ and AWQ."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model_zoo.convert.packed_weights import WORD_BITS, awq_integers, from_zero_points, integers
from model_zoo.convert.scaled_weights import Shape
from model_zoo.convert.stored_blocks import are_halves, q4_0_rows, q8_0_rows, scales_blocks
from model_zoo.convert.weight_forms import FLOATS, Blocks, Parts, Tensors, Types, WeightForm

_WORDS, _INTEGERS = frozenset({"I32"}), frozenset({"I32", "I64"})
_ZERO_POINT, _GROUPS = "_zero_point", "_g_idx"
_IN_WORDS: Types = {".qweight": _WORDS, ".qzeros": _WORDS, ".scales": FLOATS}


@dataclass(frozen=True, slots=True)
class _Grid:
    """The grid that integers index. zero, scale: [out, groups]. groups: the group of each column,
    [in]; None: each group is a run of adjacent columns."""

    zero: Tensor
    scale: Tensor
    groups: Tensor | None = None

    def is_of_blocks(self, bits: int, weight: Shape) -> bool:
        """Whether Q4_0 (4 bits) or Q8_0 (8 bits) represents the same numbers exactly."""
        if not scales_blocks(tuple(self.scale.shape), weight):
            return False
        adjacent = torch.arange(weight[1]) // (weight[1] // self.scale.shape[1])
        return (
            (self.groups is None or torch.equal(self.groups.long(), adjacent))
            and bool((self.zero == 1 << bits - 1).all())
            and are_halves(self.scale)
        )


def packed_form(bits: int) -> WeightForm:
    """`pack-quantized` of compressed-tensors: integers packed along rows, zero points along
    columns. Without stored zero points, they are 2^(bits - 1). If any index of a group is -1,
    no calibration has assigned groups, and they are adjacent columns."""

    def shape(parts: Parts) -> Shape | None:
        scale, zero = parts["_scale"].shape, parts.get(_ZERO_POINT)
        rows, columns = parts["_shape"].read().tolist() if parts["_shape"].shape == (2,) else (0, 0)
        if parts["_packed"].shape != (rows, _words(columns, bits)):
            return None
        if zero is not None and zero.shape != (_words(rows, bits), *scale[1:]):
            return None
        return _if_grouped((rows, columns), scale, parts, _GROUPS)

    def grid(parts: Tensors) -> _Grid:
        scale = parts["_scale"]
        zero = torch.full(scale.shape, 1 << bits - 1)
        if _ZERO_POINT in parts:
            zero = integers(parts[_ZERO_POINT].t(), bits).t()[: len(scale)]
        groups = parts.get(_GROUPS)
        assigned = groups is not None and -1 not in groups
        return _Grid(zero, scale, groups if assigned else None)

    return _form(
        bits,
        needed={"_packed": _WORDS, "_scale": FLOATS, "_shape": _INTEGERS},
        optional={_ZERO_POINT: _WORDS, _GROUPS: _INTEGERS},
        shape=shape,
        values=lambda parts: integers(parts["_packed"], bits)[:, : int(parts["_shape"][1])],
        grid=grid,
    )


def gptq_form(bits: int, zero_offset: int) -> WeightForm:
    """Integers packed along columns, [in words, out]; zero points along rows, [groups, out words],
    from each of which writers subtract `zero_offset` with a carry to the next."""
    offsets = zero_offset * sum(1 << place for place in range(0, WORD_BITS, bits))

    def shape(parts: Parts) -> Shape | None:
        words, zero, scale = (parts[end].shape for end in _IN_WORDS)
        if len(words) != 2 or len(scale) != 2 or zero != (scale[0], _words(words[1], bits)):
            return None
        weight = words[1], words[0] * WORD_BITS // bits
        return _if_grouped(weight, scale[::-1], parts, ".g_idx")

    def grid(parts: Tensors) -> _Grid:
        scale = parts[".scales"].t()
        zero = integers(parts[".qzeros"] + offsets, bits).t()[: len(scale)]
        return _Grid(zero, scale, parts.get(".g_idx"))

    return _form(
        bits,
        needed=_IN_WORDS,
        optional={".g_idx": _INTEGERS},
        shape=shape,
        values=lambda parts: integers(parts[".qweight"].t(), bits),
        grid=grid,
        weight=".weight",
    )


def awq_form() -> WeightForm:
    """4-bit integers and zero points, both packed along rows: [in, out words], [groups, out
    words]."""

    def shape(parts: Parts) -> Shape | None:
        words, zero, scale = (parts[end].shape for end in _IN_WORDS)
        if len(words) != 2 or len(scale) != 2 or zero != (scale[0], words[1]):
            return None
        weight = words[1] * WORD_BITS // 4, words[0]
        return _if_grouped(weight, scale[::-1], parts, None)

    return _form(
        4,
        needed=_IN_WORDS,
        optional={},
        shape=shape,
        values=lambda parts: awq_integers(parts[".qweight"]).t(),
        grid=lambda parts: _Grid(awq_integers(parts[".qzeros"]).t(), parts[".scales"].t()),
        weight=".weight",
    )


def _form(
    bits: int,
    *,
    needed: Types,
    optional: Types,
    shape: Callable[[Parts], Shape | None],
    values: Callable[[Tensors], Tensor],
    grid: Callable[[Tensors], _Grid],
    weight: str = "",
) -> WeightForm:
    """values: unsigned integers of `bits` bits, int32 [out, in]."""
    first = next(iter(needed))

    def numbers(parts: Tensors) -> Tensor:
        own = grid(parts)
        return from_zero_points(values(parts), own.zero, own.scale, own.groups)

    def exact(parts: Parts) -> bool:
        whole = shape(parts)
        assert whole is not None
        others = {end: part.read() for end, part in parts.items() if end != first}
        return grid(others).is_of_blocks(bits, whole)

    def rows(parts: Tensors) -> Tensor:
        found, scale = values(parts), grid(parts).scale
        return q4_0_rows(found, scale) if bits == 4 else q8_0_rows(found - 128, scale)

    return WeightForm(
        needed=needed,
        optional=optional,
        shape=shape,
        numbers=numbers,
        weight=weight,
        blocks={4: Blocks("Q4_0", exact, rows), 8: Blocks("Q8_0", exact, rows)}.get(bits),
    )


def _words(numbers: int, bits: int) -> int:
    return -(-numbers * bits // WORD_BITS)


def _if_grouped(weight: Shape, scale: Shape, parts: Parts, groups: str | None) -> Shape | None:
    """The weight's shape [out, in] if scales [out, groups] fit it. `groups`: the suffix of the part
    with the group of each column, which may be absent."""
    if len(scale) != 2 or scale[0] != weight[0] or not scale[1]:
        return None
    if groups is not None and groups in parts:
        return weight if parts[groups].shape == weight[1:] else None
    return weight if weight[1] % scale[1] == 0 else None
