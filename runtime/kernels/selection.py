"""The indices of the largest numbers of each row."""

from torch import Tensor

from runtime.kernels.triton.launch import has_kernels


def highest(values: Tensor, count: int) -> Tensor:
    """values [rows, n] -> int64 [rows, count]: the largest first, of equal ones the lower index
    first; NaN counts as the largest. count <= n <= 4096."""
    if not has_kernels(values.device):
        return highest_twin(values, count)
    from runtime.kernels.triton import selection

    return selection.highest(values, count)


def highest_twin(values: Tensor, count: int) -> Tensor:
    """The specification of `highest`."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
