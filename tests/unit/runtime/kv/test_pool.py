"""Pages as tensors, and page tables as the device sees them."""

import pytest
import torch

from runtime.engine.request import GenerationRequest, StopRules
from runtime.engine.sequence import Sequence
from runtime.kv.cache_kinds import Full, Sliding
from runtime.kv.cache_layout import CacheLayout, LayerCache
from runtime.kv.cache_manager import KVCacheManager
from runtime.kv.cache_types import CacheType
from runtime.kv.page_group import PageCopy
from runtime.kv.pool import KVPool, cache_bytes

CPU = torch.device("cpu")
GLOBAL = LayerCache(Full(), kv_heads=2, key_dim=4, value_dim=6)
LOCAL = LayerCache(Sliding(8), kv_heads=3, key_dim=5, value_dim=5)


@pytest.fixture
def layout() -> CacheLayout:
    return CacheLayout.of([LOCAL, GLOBAL, LOCAL, LOCAL], page_tokens=4)


def pool_of(layout: CacheLayout, type: CacheType = CacheType.FLOAT32) -> KVPool:
    return KVPool(layout, pages=(7, 9), slots=3, pages_per_sequence=5, type=type, device=CPU)


def test_each_layer_has_its_own_pages_in_the_shape_it_declares(layout):
    pool = pool_of(layout)
    for index, (group, pages, cache) in enumerate(
        [(0, 7, LOCAL), (1, 9, GLOBAL), (0, 7, LOCAL), (0, 7, LOCAL)]
    ):
        layer = pool.layer(index)
        assert layer.group == group
        assert layer.keys.shape == (pages + 1, 4, cache.kv_heads, cache.key_dim)
        assert layer.values.shape == (pages + 1, 4, cache.kv_heads, cache.value_dim)
    pool.layer(0).keys.fill_(1)
    assert pool.layer(2).keys.sum() == 0


@pytest.mark.parametrize("type", CacheType)
def test_cache_bytes_are_what_the_tensors_take(layout, type):
    pool = pool_of(layout, type)
    taken = sum(pool.layer(i).keys.nbytes + pool.layer(i).values.nbytes for i in range(4))
    assert taken == cache_bytes(layout, (7, 9), type)


@pytest.mark.parametrize("type", CacheType)
def test_values_in_keys_take_no_memory(type):
    """As in latent attention: a vector, and a rotated key after it."""
    latent = LayerCache(Full(), 1, key_dim=96, value_dim=64, values_in_keys=True)
    layout = CacheLayout.of([latent, latent], page_tokens=4)
    pool = KVPool(layout, pages=(3,), slots=1, pages_per_sequence=3, type=type, device=CPU)
    layer = pool.layer(1)
    assert layer.dims == (96, 64) and layer.values.shape == (4, 4, 1, type.width(64))
    assert layer.values.data_ptr() == layer.keys.data_ptr()
    assert cache_bytes(layout, (3,), type) == 2 * layer.keys.nbytes == 2 * 16 * type.row_bytes(96)
    layer.keys[1].copy_(torch.ones(layer.keys.shape[1:]))
    pool.copy_pages([PageCopy(0, 1, 2)])
    assert (layer.values[2].float() == 1).all() and not layer.values[0].float().any()


def test_page_writes_reach_their_group_slot_and_index_only(layout):
    pool = pool_of(layout)
    writes = {(0, 1, 2): 6, (1, 2, 4): 8, (1, 0, 0): 3}
    cells = torch.tensor([pool.table_cell(*place) for place in writes])
    pool.write_pages(cells, torch.tensor(list(writes.values()), dtype=torch.int32))
    expected = torch.tensor([7, 9], dtype=torch.int32).view(2, 1, 1).repeat(1, 3, 5)
    for place, page in writes.items():
        expected[place] = page
    assert torch.equal(torch.stack(pool.page_tables), expected)


def test_copies_of_pages_are_made_in_order_in_all_layers_of_their_group(layout):
    pool = pool_of(layout)
    for index in range(4):
        for part in (pool.layer(index).keys, pool.layer(index).values):
            part.copy_(torch.arange(len(part)).view(-1, 1, 1, 1).expand_as(part))
    pool.copy_pages([PageCopy(0, 3, 5), PageCopy(0, 5, 1), PageCopy(0, 4, 5), PageCopy(1, 8, 0)])
    for index, expected in ((0, [0, 3, 2, 3, 4, 4, 6, 7]), (1, [8, *range(1, 10)])):
        for part in (pool.layer(index).keys, pool.layer(index).values):
            assert part[:, 0, 0, 0].tolist() == expected
    assert torch.equal(pool.layer(2).keys, pool.layer(0).keys)


def test_tables_begin_with_the_page_that_no_sequence_gets(layout):
    pool = pool_of(layout)
    manager = KVCacheManager(layout.kinds, (7, 9), page_tokens=4)
    sequence = Sequence(GenerationRequest("all", (1,) * 28, StopRules(1)), [1] * 28)
    granted = [(grant.group, grant.page) for grant in manager.reserve(sequence, 28)]
    for group, table in enumerate(pool.page_tables):
        spare = {(group, page) for page in table.unique().tolist()}
        assert len(spare) == 1 and spare.isdisjoint(granted)
        layer = next(pool.layer(i) for i in range(4) if pool.layer(i).group == group)
        assert spare == {(group, len(layer.keys) - 1)}
