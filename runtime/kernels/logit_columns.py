"""Columns of logits that belong to tokens which a model must not produce."""

import torch
from torch import Tensor

from runtime.kernels.native import address, library, row_address


def limit_columns(x: Tensor, known: int, width: int, suppressed: Tensor | None = None) -> Tensor:
    """float32 [rows, width]: the first `known` columns of x float32 [rows, n], then minus infinity;
    x itself, changed, if n is `width`, which is at least n. `known` is at most n.

    suppressed int64 [count]: columns below `width` that are minus infinity, too.
    """
    (rows, n), kernels = x.shape, library() if x.device.type == "cpu" else None
    if kernels is None or x.stride(1) != 1:
        return limit_columns_twin(x, known, width, suppressed)
    result = x
    if n < width:
        result = torch.empty(rows, width)
        kernels.caravan_copy(
            row_address(x, (rows, n), torch.float32), x.stride(0), 0, result.data_ptr(), width, 0,
            rows, 1, known,
        )  # fmt: skip
    begin, stride = row_address(result, (rows, width), torch.float32), result.stride(0)
    if known < width:
        kernels.caravan_fill_columns(begin, stride, rows, known, width, -torch.inf)
    if suppressed is not None and kernels.caravan_fill_listed(
        begin, stride, rows, width, address(suppressed, (len(suppressed),), torch.int64),
        len(suppressed), -torch.inf,
    ):  # fmt: skip
        raise IndexError(f"columns beyond the {width} of logits")
    return result


def limit_columns_twin(
    x: Tensor, known: int, width: int, suppressed: Tensor | None = None
) -> Tensor:
    """The specification of `limit_columns`."""
    if x.shape[1] < width:
        x = torch.nn.functional.pad(x, (0, width - x.shape[1]))
    if known < width:
        x[:, known:] = -torch.inf
    return x if suppressed is None else x.index_fill_(1, suppressed, -torch.inf)
