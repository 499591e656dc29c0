"""Rows of blocks, rearranged into tiles of 16 rows for CPUs that multiply 16 rows at once.

A tile has the blocks of its rows in the order of a row. Of one block, the bytes of the 16 rows are
interleaved field by field; a field has four bytes, except one with the scale of a block whose size
is not a multiple of four. So the field at the offset `o` of the block `b` of a row `r`, of `w`
bytes, begins at `b * 16 * block_bytes + 16 * o + r * w` of the tile. Tiles have the same size as
their rows.
"""

from collections.abc import Iterator, Mapping
from enum import Enum
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from runtime.quant.block_types import TILE_ROWS

_WORD_BYTES = 4


class _Scale(Enum):
    """Where a block has the bytes that do not fill a word."""

    NONE = 0
    FIRST = 1
    LAST = 2


_SCALES: Mapping[str, _Scale] = MappingProxyType(
    {
        "Q4_0": _Scale.FIRST,
        "Q4_1": _Scale.NONE,
        "Q5_0": _Scale.FIRST,
        "Q5_1": _Scale.NONE,
        "Q8_0": _Scale.FIRST,
        "Q2_K": _Scale.NONE,
        "Q3_K": _Scale.LAST,
        "Q4_K": _Scale.NONE,
        "Q5_K": _Scale.NONE,
        "Q6_K": _Scale.LAST,
        "IQ4_NL": _Scale.FIRST,
        "IQ4_XS": _Scale.NONE,
        "MXFP4": _Scale.FIRST,
        "MXFP4_PAIRS": _Scale.FIRST,
        "Q16_0": _Scale.FIRST,
    }
)
# The names of the types that have tiles.
TILED = frozenset(_SCALES)


def to_tiles(rows: Tensor, type: str, block_bytes: int) -> Tensor:
    """uint8 [n * 16, row bytes] of the type with this name -> [n, 16 * row bytes]."""
    count, row_bytes = rows.shape
    assert count % TILE_ROWS == 0, count
    tiles = torch.empty(count // TILE_ROWS, TILE_ROWS * row_bytes, dtype=torch.uint8)
    for in_rows, in_tiles in _fields(rows.contiguous(), tiles, type, block_bytes):
        in_tiles[...] = in_rows
    return tiles


def to_rows(tiles: Tensor, type: str, block_bytes: int) -> Tensor:
    """uint8 [n, 16 * row bytes] -> [n * 16, row bytes]; the inverse of `to_tiles`."""
    count, tile_bytes = tiles.shape
    rows = torch.empty(count * TILE_ROWS, tile_bytes // TILE_ROWS, dtype=torch.uint8)
    for in_rows, in_tiles in _fields(rows, tiles.contiguous(), type, block_bytes):
        in_rows[...] = in_tiles
    return rows


def _fields(
    rows: Tensor, tiles: Tensor, type: str, block_bytes: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The fields of equal size as views [n, blocks, fields, 16] of rows and of tiles.

    By numpy, whose views may be of words that are not aligned, as in most rows.
    """
    count, tile_bytes = tiles.shape
    row_bytes = tile_bytes // TILE_ROWS
    blocks, rest = divmod(row_bytes, block_bytes)
    assert rest == 0, (type, row_bytes)
    for begin, fields, width in _runs(_SCALES[type], block_bytes) if count else ():
        shape, kind = (count, blocks, fields, TILE_ROWS), np.dtype(f"u{width}")
        in_rows = np.ndarray(
            shape, kind, rows.numpy(), begin, (tile_bytes, block_bytes, width, row_bytes)
        )
        in_tiles = np.ndarray(
            shape,
            kind,
            tiles.numpy(),
            TILE_ROWS * begin,
            (tile_bytes, TILE_ROWS * block_bytes, TILE_ROWS * width, width),
        )
        yield in_rows, in_tiles


def _runs(scale: _Scale, block_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Runs of fields of equal size in a block: offset, number of fields, bytes of a field."""
    words, rest = divmod(block_bytes, _WORD_BYTES)
    assert (rest == 0) == (scale is _Scale.NONE), (scale, block_bytes)
    if scale is _Scale.FIRST:
        yield 0, 1, rest
    yield rest if scale is _Scale.FIRST else 0, words, _WORD_BYTES
    if scale is _Scale.LAST:
        yield block_bytes - rest, 1, rest
