"""A bound on the memory that kernels allocate besides inputs and results."""

import torch

from runtime.kernels.attention import TWIN_ELEMENTS
from runtime.kernels.matmul import EXPANDED_ELEMENTS, SLAB_ELEMENTS
from runtime.kernels.native import library
from runtime.kernels.triton.launch import has_kernels
from runtime.kv.cache_layout import LayerCache

# The C attention kernel: a tile of queries and a block of positions for each thread, in floats.
_TILE_ROWS = 256
# Its softmax states of parts of rows, for each thread; the scores of indexers take as much.
_PART_BYTES = 1 << 21
# The torch twins: conversions of a slab through several types, and the gathered elements, masks
# and weights of attention.
TWIN_BYTES_PER_WEIGHT = 16
_TWIN_BYTES_PER_SCORE = 20
# The Triton kernels: weights that are dequantised at once for many rows, in at most float32; states
# of divided decoding rows; partial sums of products, 132 tiles of 128 outputs of 256 rows.
DENSE_ELEMENTS = 1 << 26
MOST_STATE_BYTES = 144 << 20
_PARTIAL_SUM_BYTES = 4 * 132 * 128 * 256


def workspace_bytes(
    device: torch.device, *, largest_matrix: int, caches: tuple[LayerCache, ...]
) -> int:
    """Bytes for any number of rows; `largest_matrix`: elements of the largest weight matrix."""
    slab_bytes = TWIN_BYTES_PER_WEIGHT * min(largest_matrix, SLAB_ELEMENTS)
    if has_kernels(device):  # but twins compute with experts of rows that are not whole groups
        dense_bytes = 4 * min(largest_matrix, DENSE_ELEMENTS)
        return max(slab_bytes, dense_bytes) + MOST_STATE_BYTES + _PARTIAL_SUM_BYTES
    if device.type != "cpu" or library() is None:
        return slab_bytes + _TWIN_BYTES_PER_SCORE * TWIN_ELEMENTS
    dims = max(cache.key_dim + cache.value_dim for cache in caches)
    expanded = TWIN_BYTES_PER_WEIGHT * min(largest_matrix, EXPANDED_ELEMENTS)
    per_thread = 4 * _TILE_ROWS * (dims + _TILE_ROWS) + _PART_BYTES
    return expanded + torch.get_num_threads() * per_thread
