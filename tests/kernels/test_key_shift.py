"""Keys that are rotated to other positions, in every type of cache."""

import pytest
import torch

from runtime.kernels.cache_rows import decode_rows, encode_rows
from runtime.kernels.key_shift import BLOCK_PAGES, shift_keys
from runtime.kv.cache_types import CacheType
from runtime.kv.page_group import KeyShift
from runtime.worker.model import KeyRotation, LayerPages, QuantizedRows
from tests.families.agreement import rotated

PAGES, CELLS, HEADS, DIM = 9, 4, 2, 48
# Of the largest key: one step of the type, after one in the original.
STEPS = {
    CacheType.FLOAT32: 1e-6,
    CacheType.FLOAT16: 1e-3,
    CacheType.BFLOAT16: 8e-3,
    CacheType.Q8_0: 1e-2,
    CacheType.Q4_0: 0.13,
    CacheType.FP8: 2.0**-4,
}


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize(("count", "first"), [(24, 0), (10, 0), (10, 28)])
@pytest.mark.parametrize("type", STEPS)
def test_keys_are_rotated_by_the_difference_of_positions(type, count, first, halves) -> None:
    draw = torch.Generator().manual_seed(count)
    frequencies = 10000.0 ** -(torch.arange(count) / count)
    rotation = KeyRotation(frequencies, halves, first)
    keys = encode_rows(torch.randn(PAGES, CELLS, HEADS, DIM, generator=draw), type)
    values = torch.zeros_like(keys)
    quantized = QuantizedRows(type, DIM, DIM) if type.quantized else None
    pages = LayerPages(keys.clone(), values, 0, quantized)
    moved = {page: (-64 if page < 6 else -16, 3 if page == 2 else 0) for page in (0, *range(2, 9))}
    assert len(moved) > BLOCK_PAGES
    shift_keys(pages, rotation, [KeyShift(0, p, cell, by) for p, (by, cell) in moved.items()])
    before, after = (decode_rows(each, type, DIM) for each in (keys, pages.keys))
    expected = before.clone()
    for page, (by, cell) in moved.items():
        expected[page, cell:] = rotated(before[page, cell:], rotation, by)
    assert (after - expected).abs().max() <= STEPS[type] * expected.abs().max()
    assert torch.equal(after[1], before[1]) and torch.equal(after[2, :3], before[2, :3])
    assert torch.equal(pages.values.view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize("type", STEPS)
def test_values_in_keys_stay_the_same_to_the_bit(type) -> None:
    """Those of latent attention, before the rotated elements; blocks are encoded again."""
    draw = torch.Generator().manual_seed(1)
    keys = encode_rows(torch.randn(PAGES, CELLS, HEADS, DIM, generator=draw), type)
    quantized = QuantizedRows(type, DIM, 32) if type.quantized else None
    pages = LayerPages(keys.clone(), keys, 0, quantized, values_in_keys=True)
    rotation = KeyRotation(torch.linspace(1.0, 0.1, 8), halves=False, first=32)
    shift_keys(pages, rotation, [KeyShift(0, page, 0, -5) for page in range(PAGES)])
    values = slice(0, type.width(32))
    before, after = (
        each.view(torch.uint8) for each in (keys[..., values], pages.keys[..., values])
    )
    assert torch.equal(after, before)
    assert not torch.equal(pages.keys.view(torch.uint8), keys.view(torch.uint8))
