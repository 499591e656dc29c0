"""Writes to the cache by kernel and twin: the stored numbers, and attention that reads them."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.kernels import attention as room
from runtime.kernels.attention import Scoring, paged_attention, write_cache, write_cache_twin
from runtime.kernels.cache_rows import decode_rows, encode_rows
from runtime.kv.cache_types import CacheType
from runtime.worker.model import LayerPages
from tests.kernels.native_kernels import NATIVE_TYPES, require_native_kernels
from tests.kernels.test_attention import SCALE, by_definition, in_keys, scene, stored_as

BLOCKS = {
    CacheType.Q8_0: gguf.GGMLQuantizationType.Q8_0,
    CacheType.Q4_0: gguf.GGMLQuantizationType.Q4_0,
}
HALF_MOST = 65504.0
# The largest number of a type, its largest error relative to the largest number of a block, and
# relative to a number itself.
LIMITS = {
    CacheType.FLOAT32: (torch.inf, 0.0, 0.0),
    CacheType.FLOAT16: (HALF_MOST, 0.0, 2.0**-11),
    CacheType.BFLOAT16: (torch.inf, 0.0, 2.0**-8),
    CacheType.Q8_0: (127 * HALF_MOST, 0.501 / 127, 2.0**-11),
    CacheType.Q4_0: (8 * HALF_MOST, 1.001 / 8, 2.0**-11),
    CacheType.FP8: (448.0, 0.0, 2.0**-4),
}
# Half the distance of the smallest numbers.
LEAST = {type: 2.0**-10 if type is CacheType.FP8 else 2.0**-25 for type in CacheType}


def numbers(*shape: int) -> Tensor:
    """Of many magnitudes; every seventh row has equal ones of both signs, some are zero."""
    draw = torch.Generator().manual_seed(sum(shape))
    rows = torch.randn(*shape, generator=draw)
    rows *= 10 ** torch.randn(*shape[:-1], 1, generator=draw).abs()
    rows[::7] = rows[::7].sign()
    rows[::11] = 0.0
    return rows


@pytest.mark.parametrize("type", BLOCKS)
def test_blocks_are_those_of_the_gguf_package(type: CacheType) -> None:
    rows = numbers(300, 64)
    expected = gguf.quants.quantize(rows.numpy(), BLOCKS[type])
    assert np.array_equal(encode_rows(rows, type).numpy(), expected)


@pytest.mark.parametrize("type", CacheType)
@pytest.mark.parametrize("dim", [1, 32, 80])
def test_stored_numbers_are_near_the_original_ones(type: CacheType, dim: int) -> None:
    rows = numbers(100, 3, dim)
    most, of_block, of_itself = LIMITS[type]
    stored = encode_rows(rows, type)
    assert stored.shape == (100, 3, type.width(dim)) and stored.nbytes == 300 * type.row_bytes(dim)
    error = (decode_rows(stored, type, dim) - rows.clamp(-most, most)).abs()
    bound = of_block * rows.abs().amax(-1, keepdim=True) + of_itself * rows.abs()
    assert (error <= bound + LEAST[type]).all()


@pytest.mark.parametrize("type", CacheType)
def test_large_numbers_saturate_and_nan_stays(type: CacheType) -> None:
    most = LIMITS[type][0]
    rows = torch.zeros(3, 64)
    rows[0, 3], rows[0, 40] = 1e9, -1e9
    rows[1, 3] = torch.nan
    kept = decode_rows(encode_rows(rows, type), type, 64)
    expected = min(1e9, most)
    torch.testing.assert_close(kept[0, 3].item(), expected, rtol=1e-2, atol=0)
    torch.testing.assert_close(kept[0, 40].item(), -expected, rtol=1e-2, atol=0)
    assert kept[1, 3].isnan() and not kept[1, 32:].isnan().any() and not kept[2].any()


@pytest.mark.parametrize("type", NATIVE_TYPES)
@pytest.mark.parametrize("shape", ["four share", "three share, odd sizes", "all share, tiny"])
def test_kernel_and_twin_write_the_same_bits(type: CacheType, shape: str) -> None:
    require_native_kernels()
    _, pages, plan = scene("prefill", shape, type=type)
    kv_heads, (key_dim, value_dim) = pages.keys.shape[2], pages.dims
    both = numbers(100, kv_heads * (key_dim + value_dim + 2))  # keys and values adjacent, a gap
    both[50, :4] = torch.tensor([torch.inf, torch.nan, -1e9, 1e-40])
    keys, values = both.split((kv_heads * key_dim, kv_heads * (value_dim + 2)), dim=1)
    keys = keys.unflatten(1, (kv_heads, key_dim))
    values = values[:, : kv_heads * value_dim].unflatten(1, (kv_heads, value_dim))
    written = [copied(pages), copied(pages)]
    write_cache(keys, values, written[0], plan)
    write_cache_twin(keys, values, written[1], plan)
    assert torch.equal(bits(written[0].keys), bits(written[1].keys))
    assert torch.equal(bits(written[0].values), bits(written[1].values))
    assert not torch.equal(bits(written[0].keys), bits(pages.keys))


@pytest.mark.parametrize("type", CacheType)
def test_keys_that_have_the_values_are_written_alone(type: CacheType) -> None:
    _, pages, plan = scene("prefill", "three share, odd sizes", type=type)
    keys = numbers(100, 2, 80)
    inside, apart = in_keys(copied(pages), 40)[0], copied(pages)
    write_cache(keys, None, inside, plan)
    write_cache(keys, torch.zeros(100, 2, 72), apart, plan)
    assert torch.equal(bits(inside.keys), bits(apart.keys))
    assert inside.values.data_ptr() == inside.keys.data_ptr()


def copied(pages: LayerPages) -> LayerPages:
    return replace(pages, keys=pages.keys.clone(), values=pages.values.clone())


def bits(stored: Tensor) -> Tensor:
    """All NaN are one."""
    if stored.is_floating_point():
        stored = torch.where(stored.isnan(), torch.zeros_like(stored), stored)
    return stored.contiguous().view(torch.uint8)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("type", CacheType)
def test_attention_reads_what_was_written(
    type: CacheType, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(room, "library", lambda: None)
    elif type not in NATIVE_TYPES:
        pytest.skip("no C kernel knows it, so the twin computes in both cases")
    queries, pages, plan = scene("prefill", "three share, odd sizes", type=type)
    pages = copied(pages)
    keys, values = torch.randn(100, 2, 80), torch.randn(100, 2, 72)
    write_cache(keys, values, pages, plan)
    direct = stored_as(type, keys[50], values[50])
    page, offset = int(plan.page_table[1, 50 // 7]), 50 % 7
    assert torch.equal(bits(pages.keys[page, offset]), bits(direct.keys))
    assert torch.equal(bits(pages.values[page, offset]), bits(direct.values))
    got = paged_attention(queries, pages, plan, Scoring(SCALE))
    expected = by_definition(queries, pages, plan, Scoring(SCALE)).float()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("type", [CacheType.FLOAT16, CacheType.Q8_0, CacheType.FP8], ids=str)
def test_rows_in_16_bits_have_the_same_range(type: CacheType) -> None:
    rows = torch.tensor([[torch.inf, -torch.inf] + [0.0] * 30], dtype=torch.bfloat16)
    got = decode_rows(encode_rows(rows, type), type, 32)[0, :2]
    most = LIMITS[type][0]
    assert got.tolist() == [most, -most]
