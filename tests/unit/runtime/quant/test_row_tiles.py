"""Rows of blocks in tiles, against the written-out places of their bytes and against the rows."""

import numpy as np
import pytest
import torch

from runtime.quant.block_types import MXFP4_PAIRS, Q16_0, TILE_ROWS, BlockType, block_type
from runtime.quant.formats.row_tiles import to_rows, to_tiles
from runtime.quant.weight import TILED_TYPES, Weight, dequantize
from tests.block_samples import random_blocks
from tests.tiles import in_tiles

# For each type, where the field that is not a word begins in a block, and how long it is.
ODD_FIELDS = {
    "Q4_0": (0, 2),
    "Q4_1": None,
    "Q5_0": (0, 2),
    "Q5_1": None,
    "Q8_0": (0, 2),
    "Q2_K": None,
    "Q3_K": (108, 2),
    "Q4_K": None,
    "Q5_K": None,
    "Q6_K": (208, 2),
    "IQ4_NL": (0, 2),
    "IQ4_XS": None,
    "MXFP4": (0, 1),
    "MXFP4_PAIRS": (0, 1),
    "Q16_0": (0, 1),
}
every_type = pytest.mark.parametrize("name", ODD_FIELDS)


def type_named(name: str) -> BlockType:
    others = {type.name: type for type in (MXFP4_PAIRS, Q16_0)}
    return others.get(name) or block_type(name)


def random_weight(name: str, *shape: int) -> Weight:
    """Random bits of a tensor (..., rows, blocks)."""
    type = type_named(name)
    data = torch.from_numpy(random_blocks(type, shape))
    return Weight(data, type, (*shape[:-1], shape[-1] * type.block_elements))


def equal(a: Weight, b: Weight) -> bool:
    return a.type == b.type and a.shape == b.shape and torch.equal(a.data, b.data)


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


def fields(name: str) -> list[tuple[int, int]]:
    """Offset and width of each field of a block."""
    size, odd = type_named(name).block_bytes, ODD_FIELDS[name]
    begin = odd[1] if odd is not None and odd[0] == 0 else 0
    words = [(at, 4) for at in range(begin, size - 3, 4)]
    return words if odd is None else [*words, odd]


def test_these_types_have_tiles() -> None:
    by_name = {type.blocks.name: type for type in TILED_TYPES.values()}
    assert set(by_name) == set(ODD_FIELDS)
    for name, type in by_name.items():
        assert type.blocks == type_named(name) and type is TILED_TYPES[type.id]
        assert (type.id, type.name) == (2000 + type.blocks.id, f"{name} in tiles")


@every_type
def test_each_byte_is_where_the_format_states(name: str) -> None:
    size, blocks, tiles = type_named(name).block_bytes, 3, 2
    rows = np.random.default_rng(1).integers(0, 256, (tiles * 16, blocks * size), dtype=np.uint8)
    expected = np.zeros((tiles, 16 * blocks * size), np.uint8)
    for row in range(tiles * 16):
        for block in range(blocks):
            for offset, width in fields(name):
                for byte in range(width):
                    place = block * 16 * size + 16 * offset + row % 16 * width + byte
                    expected[row // 16, place] = rows[row, block * size + offset + byte]
    assert np.array_equal(to_tiles(torch.from_numpy(rows), name, size).numpy(), expected)


@every_type
@pytest.mark.parametrize(("rows", "blocks"), [(16, 1), (48, 7), (0, 2)])
def test_tiles_have_all_bits_of_the_rows(name: str, rows: int, blocks: int) -> None:
    size = type_named(name).block_bytes
    data = torch.randint(0, 256, (rows, blocks * size), dtype=torch.uint8)
    assert torch.equal(to_rows(to_tiles(data, name, size), name, size), data)


@every_type
def test_weights_have_the_same_values_in_tiles(name: str) -> None:
    weight = random_weight(name, 3, 32, 3)
    tiled = in_tiles(weight)
    assert tiled.data.shape == (3, 2, weight.data.shape[-1] * TILE_ROWS)
    assert (tiled.nbytes, tiled.numbers()) == (weight.nbytes, None)
    assert equal_bits(tiled.dequantize(), weight.dequantize())
    assert equal_bits(dequantize(tiled.data[1, 1:], tiled.type), weight.dequantize()[1, 16:])


@every_type
def test_views_of_tiles_are_tiles_of_views(name: str) -> None:
    weight = random_weight(name, 4, 48, 5)
    tiled, block = in_tiles(weight), weight.type.block_elements
    assert equal(tiled.matrices(1, 3), in_tiles(weight.matrices(1, 3)))
    assert equal(tiled.outputs(16, 48), in_tiles(weight.outputs(16, 48)))
    inner = tiled.inputs(block, 4 * block)
    assert equal(inner, in_tiles(weight.inputs(block, 4 * block)))
    assert equal_bits(inner.dequantize(), weight.inputs(block, 4 * block).dequantize())


def test_flat_rows_in_tiles_are_split_into_matrices() -> None:
    weight = random_weight("Q4_0", 96, 2)
    assert equal(in_tiles(weight).unflatten(2), in_tiles(weight.unflatten(2)))


def test_parts_of_tiles_are_refused() -> None:
    weight = random_weight("Q4_0", 32, 2)
    with pytest.raises(AssertionError):
        in_tiles(random_weight("Q4_0", 24, 2))
    for begin, end in ((0, 8), (8, 16)):
        with pytest.raises(AssertionError):
            in_tiles(weight).outputs(begin, end)
    with pytest.raises(AssertionError):
        in_tiles(weight).unflatten(4)
