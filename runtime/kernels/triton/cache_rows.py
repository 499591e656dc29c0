"""Rows of the cache in registers: how kernels read what `write_cache` stored."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.triton.e4m3 import from_e4m3
from runtime.kv.cache_types import CacheType
from runtime.worker.model import LayerPages

# The constant BLOCK of the kernels: bytes of a block of 32 elements; 0 for caches of floats, where
# one-byte elements are E4M3.
BLOCK_BYTES = {type: type.width(1) if type.quantized else 0 for type in CacheType}


def kernel_pages(pages: LayerPages) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, keys viewed as float16, values, values viewed as float16. Only blocks need the float16
    views, to read their scales; for other types they are the plain tensors."""
    keys, values = pages.keys, pages.values
    if pages.type is CacheType.FP8:  # Triton converts it on devices from 8.9 on only
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    if not pages.type.quantized:
        return keys, keys, values, values
    return keys, keys.view(torch.float16), values, values.view(torch.float16)


@triton.jit
def load_rows(
    stored,
    halves,
    row,
    exists,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """WIDTH elements from START on of rows [n] int64 -> [n, WIDTH], in the type of the cache; bytes
    of E4M3 in that of `from_e4m3`, and blocks in float32. Zero beyond DIM, with blocks beyond the
    last one of DIM, and where a row does not exist. ROW: the elements of a row in the cache.

    halves: `stored` as float16. A byte of Q4_0 has elements j and j + 16 of its block, and is
    loaded for each of them: for operands of joined nibbles Triton chooses a layout that needs 32
    inner elements, and sums over 16 positions are wrong.
    """
    if BLOCK == 0:
        element = START + tl.arange(0, WIDTH)
        mask = exists[:, None]
        if START + WIDTH > DIM:
            mask = mask & (element < DIM)[None, :]
        value = tl.load(stored + row[:, None] * ROW + element[None, :], mask=mask, other=0)
        if stored.dtype.element_ty == tl.uint8:
            value = from_e4m3(value)
    else:
        COUNT: tl.constexpr = (DIM + 31) // 32
        block = START // 32 + tl.arange(0, WIDTH // 32)
        mask = exists[:, None] & (block < COUNT)[None, :]
        at = row[:, None] * ((ROW + 31) // 32 * BLOCK) + block[None, :] * BLOCK
        scale = tl.load(halves + at // 2, mask=mask, other=0.0).to(tl.float32)
        element = tl.arange(0, 32)[None, None, :]
        byte = at[:, :, None] + 2 + element % (BLOCK - 2)
        code = tl.load(stored + byte, mask=mask[:, :, None], other=0)
        if BLOCK == 34:
            value = code.to(tl.int8, bitcast=True).to(tl.float32)
        else:
            value = (code >> element // 16 * 4 & 15).to(tl.float32) - 8.0
        value = tl.reshape(value * scale[:, :, None], (value.shape[0], WIDTH))
    return value
