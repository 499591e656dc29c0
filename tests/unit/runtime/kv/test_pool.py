"""Pages as tensors, and page tables as the device sees them."""

import pytest
import torch

from runtime.kv.cache_types import CacheType
from runtime.kv.pool import KVPool, page_bytes
from runtime.kv.spec import CacheLayout, Full, LayerCache, Sliding

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
        assert layer.keys.shape == (pages, 4, cache.kv_heads, cache.key_dim)
        assert layer.values.shape == (pages, 4, cache.kv_heads, cache.value_dim)
    pool.layer(0).keys.fill_(1)
    assert pool.layer(2).keys.sum() == 0


@pytest.mark.parametrize("type", CacheType)
def test_page_bytes_add_up_to_what_the_tensors_take(layout, type):
    pool = pool_of(layout, type)
    taken = sum(pool.layer(i).keys.nbytes + pool.layer(i).values.nbytes for i in range(4))
    assert taken == 7 * page_bytes(layout, 0, type) + 9 * page_bytes(layout, 1, type)


def test_page_writes_reach_their_group_slot_and_index_only(layout):
    pool = pool_of(layout)
    writes = {(0, 1, 2): 6, (1, 2, 4): 8, (1, 0, 0): 3}
    cells = torch.tensor([pool.table_cell(*place) for place in writes])
    pool.write_pages(cells, torch.tensor(list(writes.values()), dtype=torch.int32))
    expected = torch.zeros(2, 3, 5, dtype=torch.int32)
    for place, page in writes.items():
        expected[place] = page
    assert torch.equal(torch.stack(pool.page_tables), expected)


def test_clearing_a_page_leaves_the_others(layout):
    pool = pool_of(layout)
    for index in range(4):
        pool.layer(index).keys.fill_(1)
        pool.layer(index).values.fill_(1)
    pool.clear_page(2)
    for index in range(4):
        for tensor in (pool.layer(index).keys, pool.layer(index).values):
            assert tensor[2].sum() == 0
            assert tensor[[0, 1, 3]].min() == 1
