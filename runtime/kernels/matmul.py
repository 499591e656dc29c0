"""Activations times a weight that stays in its block format."""

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.native import address, library
from runtime.quant import Weight, dequantize

# Bounds what the twin holds besides the weight: 64 MiB in float32.
SLAB_ELEMENTS = 1 << 24


def matmul(x: Tensor, weight: Weight) -> Tensor:
    """x [tokens, in] of float32, bfloat16 or float16, weight (out, in) -> [tokens, out] like x.

    On a CPU with a C compiler, computed in float32 and the bits of a row do not depend on the
    other rows.
    """
    kernels = library() if x.device.type == "cpu" else None
    if kernels is None or not kernels.caravan_matmul_knows(weight.type.id):
        return matmul_twin(x, weight)
    return _matmul_cpu(kernels, x, weight)


def matmul_twin(x: Tensor, weight: Weight) -> Tensor:
    """The specification of `matmul`: the weight in x's type, a slab at a time, and a product."""
    slabs = weight.data.split(max(1, SLAB_ELEMENTS // weight.shape[-1]))
    products = [F.linear(x, dequantize(slab, weight.type).to(x.dtype)) for slab in slabs]
    return products[0] if len(products) == 1 else torch.cat(products, dim=-1)


def _matmul_cpu(kernels: ctypes.CDLL, x: Tensor, weight: Weight) -> Tensor:
    (rows, elements), (outs, expected) = x.shape, weight.shape
    assert elements == expected, (x.shape, weight.shape)
    wide = x.float().contiguous()
    result = torch.empty(rows, outs)
    if rows and outs:
        scratch = torch.empty(kernels.caravan_matmul_scratch(rows, elements))
        kernels.caravan_matmul(
            weight.type.id, address(wide), address(weight.data), weight.data.stride(0),
            rows, outs, elements, address(result), address(scratch), torch.get_num_threads(),
        )  # fmt: skip
    return result.to(x.dtype)
