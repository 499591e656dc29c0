"""What the kernels allocate beside inputs and results: one bound for plans of memory."""

import torch

from runtime.kernels.native import library
from runtime.kv.spec import LayerCache

# The C kernels: a tile of queries and a block of positions for each thread, in floats.
_TILE_ROWS = 256
# The torch twins: a matrix is expanded whole, through values of several types, and attention
# gathers, masks and weighs at most 2^25 elements at once.
_TWIN_BYTES_PER_WEIGHT = 16
_TWIN_ATTENTION_BYTES = 5 * 4 << 25


def workspace_bytes(
    device: torch.device, *, largest_matrix: int, caches: tuple[LayerCache, ...]
) -> int:
    """Whatever the number of rows; `largest_matrix`: weights in the largest product's matrix."""
    if device.type != "cpu" or library() is None:
        return _TWIN_BYTES_PER_WEIGHT * largest_matrix + _TWIN_ATTENTION_BYTES
    dims = max(cache.key_dim + cache.value_dim for cache in caches)
    return torch.get_num_threads() * 4 * _TILE_ROWS * (dims + _TILE_ROWS)
