"""Rows of quantised matrices, and the rows of tables that belong to ids."""

import torch
from torch import Tensor

from runtime.kernels.native import address, library, row_address
from runtime.kernels.triton.launch import has_kernels
from runtime.quant.weight import Weight, gather_rows

MOST_ID = 2**63 - 1


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


def known_ids(ids: Tensor, rows: int) -> Tensor:
    """ids int64 [n], not negative -> the same, but 0 for those that are not below `rows`."""
    if ids.device.type == "cpu" and library() is not None:
        return _table_rows(ids, each=1, rows=rows)
    return known_ids_twin(ids, rows)


def known_ids_twin(ids: Tensor, rows: int) -> Tensor:
    """The specification of `known_ids`."""
    return ids.where(ids < rows, 0)


def groups_of(ids: Tensor, size: int) -> Tensor:
    """ids int64 of any shape, not negative -> the number of the group of each, if `size`
    consecutive ids form a group."""
    if ids.device.type == "cpu" and library() is not None:
        return _table_rows(ids, each=size, rows=MOST_ID)
    return ids // size


def _table_rows(ids: Tensor, *, each: int, rows: int) -> Tensor:
    kernels = library()
    assert kernels is not None
    result = torch.empty_like(ids)
    kernels.caravan_table_rows(
        address(ids, ids.shape, torch.int64), ids.numel(), each, rows, result.data_ptr()
    )
    return result
