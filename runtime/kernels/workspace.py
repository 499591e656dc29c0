"""A bound on the memory that kernels allocate besides inputs and results."""

import torch

from runtime.kernels.attention import TWIN_ELEMENTS
from runtime.kernels.matmul import EXPANDED_ELEMENTS, SLAB_ELEMENTS
from runtime.kernels.native import library
from runtime.kv.spec import LayerCache

# The C attention kernel: a tile of queries and a block of positions for each thread, in floats.
_TILE_ROWS = 256
# Its softmax states of parts of rows, for each thread.
_PART_BYTES = 1 << 21
# The torch twins: conversions of a slab through several types, and the gathered elements, masks
# and weights of attention.
TWIN_BYTES_PER_WEIGHT = 16
_TWIN_BYTES_PER_SCORE = 20


def workspace_bytes(
    device: torch.device, *, largest_matrix: int, caches: tuple[LayerCache, ...]
) -> int:
    """Bytes for any number of rows; `largest_matrix`: elements of the largest weight matrix."""
    if device.type != "cpu" or library() is None:
        slab = min(largest_matrix, SLAB_ELEMENTS)
        return TWIN_BYTES_PER_WEIGHT * slab + _TWIN_BYTES_PER_SCORE * TWIN_ELEMENTS
    dims = max(cache.key_dim + cache.value_dim for cache in caches)
    expanded = TWIN_BYTES_PER_WEIGHT * min(largest_matrix, EXPANDED_ELEMENTS)
    per_thread = 4 * _TILE_ROWS * (dims + _TILE_ROWS) + _PART_BYTES
    return expanded + torch.get_num_threads() * per_thread
