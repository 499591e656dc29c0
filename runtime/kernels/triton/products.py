"""Which kernel multiplies by weights in planes or plain numbers, by the number of rows.

For a few rows and planes, `Weight.compute` means the same as on a CPU. More rows are multiplied by
tensor cores in the rows' own type, to which weights are rounded as in the twins: up to 64 rows of
16 bits by fragments, up to 256 by wide tiles on Hopper, others by tiles, many by cuBLAS. Numbers of
the rows' type are multiplied by cuBLAS, others by tiles, which convert what they have read, and
many rows by cuBLAS. Deterministic weights are always multiplied by tiles, of one size for all
numbers of rows.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.activations import MOST_ROUNDED_ROWS, Activations, unrounded
from runtime.kernels.triton.bundles import bundles_of
from runtime.kernels.triton.dequantize import dequantized
from runtime.kernels.triton.fragments import MOST_ROWS as MOST_FRAGMENT_ROWS
from runtime.kernels.triton.fragments import (
    expert_fragments,
    fragment_products,
    gated_fragments,
    program_rows,
)
from runtime.kernels.triton.launch import divided, with_adjacent_elements
from runtime.kernels.triton.pointwise import gate
from runtime.kernels.triton.tiles import (
    bundle_size,
    expert_tiles,
    gated_tiles,
    most_rows,
    tile_product,
)
from runtime.kernels.triton.vector import expert_vectors, gated_vectors, vector_products
from runtime.kernels.triton.wide_tiles import MOST_ROWS as MOST_WIDE_ROWS
from runtime.kernels.triton.wide_tiles import gated_wide_tiles, has_wide_tiles, wide_products
from runtime.kernels.workspace import DENSE_ELEMENTS
from runtime.quant.weight import Weight

# Up to this mean number of pairs per expert, each pair reads the expert's matrix by itself.
_VECTORS_PER_EXPERT = 2


def product(x: Activations, weight: Weight, operands: torch.dtype | None = None) -> Tensor:
    """As `matmul`; weight (out, in), `by_triton`."""
    if _by_vectors(x, weight):
        return vector_products(x, (weight,))[0]
    x = with_adjacent_elements(unrounded(x))
    if not x.shape[0]:
        return x.new_empty(0, weight.shape[0])
    operands = operands or x.dtype
    if _by_fragments(operands, len(x), weight):
        return fragment_products(x, (weight,), operands)[0]
    if _by_wide_tiles(x, operands, weight):
        return wide_products(x, (weight,), operands)[0]
    if _by_tiles(x, operands, weight):
        return tile_product(x.to(operands), weight, x.dtype)
    return _dense_product(x, weight)


def products(x: Activations, weights: Sequence[Weight]) -> tuple[Tensor, ...]:
    """As `matmuls`; weights (out, in), `by_triton`."""
    if all(_by_vectors(x, weight) for weight in weights):
        return vector_products(x, weights)
    rows = unrounded(x)
    if len(rows) and all(_by_fragments(rows.dtype, len(rows), weight) for weight in weights):
        return fragment_products(with_adjacent_elements(rows), weights, rows.dtype)
    if len(rows) and all(_by_wide_tiles(rows, rows.dtype, weight) for weight in weights):
        return wide_products(with_adjacent_elements(rows), weights, rows.dtype)
    return tuple(product(x, weight) for weight in weights)


def gated_product(x: Activations, weight: Weight, curve: int) -> Tensor:
    """As `gated_matmul`; weight (2 n, in), `by_triton`, curve: of `gate`."""
    if _by_vectors(x, weight):
        return gated_vectors(x, weight, curve)
    x = with_adjacent_elements(unrounded(x))
    if not x.shape[0]:
        return x.new_empty(0, weight.shape[0] // 2)
    if _by_fragments(x.dtype, len(x), weight):
        return gated_fragments(x, weight, curve)
    if _by_wide_tiles(x, x.dtype, weight):
        return gated_wide_tiles(x, weight, curve)
    if _by_tiles(x, x.dtype, weight):
        return gated_tiles(x, weight, curve)
    return gate(curve, *_dense_product(x, weight).chunk(2, dim=1))


def experts_product(
    x: Activations, weight: Weight, chosen: Tensor, bias: Tensor | None, scale: Tensor | None
) -> Tensor:
    """As `expert_products`; weight (experts, out, in), `by_triton`."""
    pairs, (experts, outs, _) = chosen.numel(), weight.shape
    if not pairs:
        return unrounded(x).new_empty(*chosen.shape, outs)
    if weight.rounding is not None and pairs <= _VECTORS_PER_EXPERT * experts:
        return expert_vectors(x, weight, chosen, bias, scale)
    x, mean = unrounded(x).contiguous(), divided(pairs, experts)
    if _by_fragments(x.dtype, mean, weight):
        bundles = bundles_of(chosen.flatten(), experts, program_rows(mean))
        return expert_fragments(x, weight, bundles, chosen.shape, bias, scale)
    size = bundle_size(x.dtype, None if weight.deterministic else mean)
    bundles = bundles_of(chosen.flatten(), experts, size)
    return expert_tiles(x, weight, bundles, chosen.shape, bias, scale)


def _by_vectors(x: Activations, weight: Weight) -> bool:
    return weight.rounding is not None and 0 < len(unrounded(x)) <= MOST_ROUNDED_ROWS


def _by_fragments(dtype: torch.dtype, rows: int, weight: Weight) -> bool:
    """For rows that are too many for vectors."""
    few = dtype.itemsize == 2 and rows <= MOST_FRAGMENT_ROWS
    return few and weight.number_type is None and not weight.deterministic


def _by_wide_tiles(x: Tensor, operands: torch.dtype, weight: Weight) -> bool:
    """For rows that are too many for fragments."""
    few = operands.itemsize == 2 and len(x) <= MOST_WIDE_ROWS and has_wide_tiles(x.device)
    return few and weight.number_type is None and not weight.deterministic


def _by_tiles(x: Tensor, operands: torch.dtype, weight: Weight) -> bool:
    """For rows that are too many for wide tiles, and numbers of another type. Rows of numbers that
    are not whole groups would be padded."""
    if weight.deterministic:
        return True
    if weight.number_type == x.dtype or weight.shape[1] % 32:
        return False
    return operands != x.dtype or len(x) <= most_rows(x, weight)


def _dense_product(x: Tensor, weight: Weight) -> Tensor:
    outs, elements = weight.shape
    at_once = max(1, DENSE_ELEMENTS // elements)
    if outs <= at_once or weight.number_type == x.dtype:
        return F.linear(x, _dense(weight, x.dtype))
    result = torch.empty(x.shape[0], outs, dtype=x.dtype, device=x.device)
    for begin in range(0, outs, at_once):
        slab = weight.outputs(begin, min(outs, begin + at_once))
        torch.mm(x, _dense(slab, x.dtype).t(), out=result[:, begin : begin + at_once])
    return result


def _dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """[out, in]; numbers of this type themselves."""
    numbers = weight.numbers()
    return dequantized(weight, dtype) if numbers is None else numbers.to(dtype)
