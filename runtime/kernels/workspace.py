"""What the kernels allocate beside inputs and results: one bound for plans of memory."""

import torch

from runtime.kernels.attention import TWIN_ELEMENTS
from runtime.kernels.matmul import EXPANDED_ELEMENTS, SLAB_ELEMENTS
from runtime.kernels.native import library
from runtime.kv.spec import LayerCache

# The C attention kernel: a tile of queries and a block of positions for each thread, in floats.
_TILE_ROWS = 256
# The torch twins: a slab of a matrix passes through values of several types, and attention
# gathers, masks and weighs so many elements at once.
TWIN_BYTES_PER_WEIGHT = 16
_TWIN_BYTES_PER_SCORE = 20


def workspace_bytes(
    device: torch.device, *, largest_matrix: int, caches: tuple[LayerCache, ...]
) -> int:
    """Whatever the number of rows; `largest_matrix`: weights in the largest product's matrix."""
    if device.type != "cpu" or library() is None:
        slab = min(largest_matrix, SLAB_ELEMENTS)
        return TWIN_BYTES_PER_WEIGHT * slab + _TWIN_BYTES_PER_SCORE * TWIN_ELEMENTS
    dims = max(cache.key_dim + cache.value_dim for cache in caches)
    expanded = TWIN_BYTES_PER_WEIGHT * min(largest_matrix, EXPANDED_ELEMENTS)
    return expanded + torch.get_num_threads() * 4 * _TILE_ROWS * (dims + _TILE_ROWS)
