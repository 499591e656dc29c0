"""Activations times a quantised weight."""

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.activations import Activations, unrounded
from runtime.kernels.native import address, library, row_address
from runtime.kernels.pointwise import Gate, curve_of
from runtime.kernels.triton.launch import has_kernels
from runtime.quant.block_types import BlockType, block_type
from runtime.quant.weight import TILED_TYPES, Compute, Weight, dequantize

# Number of weights that the twin dequantises at once: 64 MiB in float32.
SLAB_ELEMENTS = 1 << 24
# Number of weights of a type without C kernel that are dequantised at once for the float32 kernel.
EXPANDED_ELEMENTS = 1 << 16


def matmul(x: Activations, weight: Weight, *, operands: torch.dtype | None = None) -> Tensor:
    """x [tokens, in] of float32, bfloat16 or float16, weight (out, in) -> [tokens, out] like x.

    With kernels it is computed as `weight.compute` says, accumulated in float32. With C kernels,
    and with `weight.deterministic`, the bits of a row do not depend on other rows. `operands`: the
    type to which CUDA devices may round x and weights where they multiply with tensor cores; None
    for that of x.
    """
    if weight.by_triton and has_kernels(unrounded(x).device):
        from runtime.kernels.triton.products import product

        return product(x, weight, operands)
    x = unrounded(x)
    kernels = library() if x.device.type == "cpu" else None
    if kernels is None:
        return matmul_twin(x, weight)
    result = torch.empty(x.shape[0], weight.shape[0])
    if kernels.caravan_matmul_knows(weight.type.id, weight.compute):
        _matmul_cpu(kernels, x.float().contiguous(), weight, result)
    else:
        _matmul_expanded(kernels, x.float().contiguous(), weight, result)
    return result.to(x.dtype)


def matmuls(x: Activations, weights: Sequence[Weight]) -> tuple[Tensor, ...]:
    """`matmul` with each weight; CUDA devices round x once for all of them."""
    if has_kernels(unrounded(x).device) and all(each.by_triton for each in weights):
        from runtime.kernels.triton.products import products

        return products(x, weights)
    return tuple(matmul(x, weight) for weight in weights)


def gated_matmul(x: Activations, weight: Weight, gate: Gate) -> Tensor:
    """x [tokens, in], weight (2 n, in) -> [tokens, n] like x: `gate` of the products with the first
    n rows and those with the others. CUDA devices compute it with the products, if `curve_of` knows
    it."""
    curve = curve_of(gate)
    if curve is not None and weight.by_triton and has_kernels(unrounded(x).device):
        from runtime.kernels.triton.products import gated_product

        return gated_product(x, weight, curve)
    return gate(*matmul(x, weight).chunk(2, dim=1))


def gated_matmul_twin(x: Tensor, weight: Weight, gate: Gate) -> Tensor:
    """The specification of `gated_matmul`."""
    return gate(*matmul_twin(x, weight).chunk(2, dim=1))


def matmul_twin(x: Tensor, weight: Weight) -> Tensor:
    """The specification of `matmul`: dequantise the weight to x's type, a slab at a time."""
    numbers = weight.numbers()
    if numbers is not None and numbers.dtype == x.dtype:
        return F.linear(x, numbers)
    slabs = weight.data.split(_slab_rows(weight, SLAB_ELEMENTS))
    products = [F.linear(x, dequantize(slab, weight.type).to(x.dtype)) for slab in slabs]
    return products[0] if len(products) == 1 else torch.cat(products, dim=-1)


def tiled_type(type: BlockType, compute: Compute) -> BlockType | None:
    """The type of tiles whose products on this CPU, computed as `compute` says, are faster than
    those of rows of `type`; None if there is none."""
    kernels = library()
    return (
        None if kernels is None else TILED_TYPES.get(kernels.caravan_tiled_type(type.id, compute))
    )


def _slab_rows(weight: Weight, elements: int) -> int:
    """Rows of `weight.data` with at most so many weights, but at least one."""
    return max(1, elements // (weight.shape[-1] * weight.type.interleaved_rows))


class _MatmulJob(ctypes.Structure):
    """`caravan_matmul_job` in cpu/matmul.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "y", "packed")),
        *((name, ctypes.c_int64) for name in ("row_bytes", "y_stride")),
        *((name, ctypes.c_int32) for name in ("type", "compute", "rows", "outs", "elements")),
    )


def _matmul_expanded(kernels: ctypes.CDLL, x: Tensor, weight: Weight, result: Tensor) -> None:
    """For weights without a kernel (integers, doubles, tiles in float32): a slab at a time."""
    plain, begin = block_type("F32"), 0
    for slab in weight.data.split(_slab_rows(weight, EXPANDED_ELEMENTS)):
        rows = dequantize(slab, weight.type)
        expanded = Weight(rows.view(torch.uint8), plain, tuple(rows.shape))
        _matmul_cpu(kernels, x, expanded, result[:, begin : begin + len(rows)])
        begin += len(rows)


def _matmul_cpu(kernels: ctypes.CDLL, x: Tensor, weight: Weight, result: Tensor) -> None:
    """x [rows, in] float32, contiguous; result [rows, out], rows may be strided."""
    rows, (outs, elements) = x.shape[0], weight.shape
    inputs = address(x, (rows, elements))
    blocks = row_address(weight.data, weight.type.data_shape(weight.shape), torch.uint8)
    products = row_address(result, (rows, outs), torch.float32)
    if rows and outs:
        how = weight.type.id, weight.compute
        packed = torch.empty(kernels.caravan_packed_bytes(*how, rows, elements), dtype=torch.uint8)
        row_bytes = weight.data.stride(0) // weight.type.interleaved_rows
        job = _MatmulJob(
            inputs, blocks, products, packed.data_ptr(), row_bytes, result.stride(0),
            *how, rows, outs, elements,
        )  # fmt: skip
        kernels.caravan_matmul(ctypes.byref(job), torch.get_num_threads())
