"""Rows of quantised matrices."""

import torch
from torch import Tensor

from runtime.kernels.native import address, library, row_address
from runtime.kernels.triton.launch import has_kernels
from runtime.quant.weight import Weight, gather_rows


def embedding_rows(weight: Weight, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """weight (rows, in), ids [n] int64 -> [n, in] in `dtype`, float32 bit for bit as `gather_rows`,
    the twin.

    Raises IndexError for ids outside the rows, except on CUDA devices.
    """
    if weight.type.blocks is not None and has_kernels(ids.device):
        from runtime.kernels.triton.dequantize import dequantized

        return dequantized(weight, dtype, ids)
    kernels = library() if ids.device.type == "cpu" else None
    if kernels is None or not kernels.caravan_embedding_knows(weight.type.id):
        return gather_rows(weight, ids).to(dtype)
    rows, elements = weight.shape
    data = row_address(weight.data, (rows, weight.type.row_bytes(elements)), torch.uint8)
    result = torch.empty(len(ids), elements)
    if kernels.caravan_embedding(
        weight.type.id, data, weight.data.stride(0), rows, address(ids, (len(ids),), torch.int64),
        len(ids), elements, result.data_ptr(),
    ):  # fmt: skip
        raise IndexError(f"ids outside the {rows} rows of a matrix")
    return result.to(dtype)
