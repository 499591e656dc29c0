"""Batches of copies between device and host have the effect of the copies one after the other."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.kv.cache_kinds import Full, Sliding
from runtime.kv.cache_layout import CacheLayout, LayerCache
from runtime.kv.cache_types import CacheType
from runtime.kv.host_copies import batches
from runtime.kv.page_group import CopyKind, PageCopy
from runtime.kv.pool import KVPool
from runtime.kv.states import Recurrent, StateCache

CPU = torch.device("cpu")
PAGES, HOST_PAGES = (6, 5, 4, 4, 4), (4, 3, 2, 2, 2)
LAYERS = [
    LayerCache(Full(), 2, 32, 64),
    LayerCache(Sliding(8), 1, 32, 32),
    LayerCache(Full(), 2, 32, 64),
    LayerCache(Full(), 1, 64, 32, values_in_keys=True),
    StateCache(Recurrent(), 2, 3, 5, 7, 3),
    StateCache.of_inputs(9, 1),
]


def pool_of(layers: list[LayerCache], type: CacheType, **options) -> KVPool:
    layout = CacheLayout.of(layers, page_tokens=2)
    sizes = {"pages": PAGES, "host_pages": HOST_PAGES, **options}
    pool = KVPool(layout, slots=1, pages_per_sequence=1, type=type, device=CPU, **sizes)
    for part in parts_of(pool, len(layers)):
        part.flatten(1).view(torch.uint8).random_(to=100)
    return pool


def parts_of(pool: KVPool, layers: int) -> Iterator[Tensor]:
    for index in range(layers):
        yield from pool.layer(index).stored


@pytest.mark.parametrize("workspace", [0, 1200, 1 << 20])
@pytest.mark.parametrize("type", [CacheType.FLOAT16, CacheType.Q4_0])
@pytest.mark.parametrize("seed", range(5))
def test_random_copies_have_the_effect_of_their_order(seed, type, workspace) -> None:
    """Among few pages, so that most copies depend on earlier ones."""
    rng = random.Random(seed)
    pool = pool_of(LAYERS, type, workspace_bytes=workspace)
    expected = [part.clone() for part in parts_of(pool, len(LAYERS))]
    groups = [layer.group for layer in map(pool.layer, range(len(LAYERS))) for _ in layer.stored]
    host: dict[tuple[int, int], list[Tensor]] = {}  # the parts' pages of a group's host page
    copies = []
    for _ in range(60):
        group, kind = rng.randrange(5), rng.choice(list(CopyKind))
        own = [part for part, of in zip(expected, groups, strict=True) if of == group]
        page, target, on_host = (
            rng.randrange(n) for n in (PAGES[group],) * 2 + (HOST_PAGES[group],)
        )
        if kind is CopyKind.ON_DEVICE:
            copies.append(PageCopy(group, page, target))
            moved = [part[page].clone() for part in own]
        elif kind is CopyKind.TO_HOST:
            copies.append(PageCopy(group, page, on_host, kind))
            host[group, on_host] = [part[page].clone() for part in own]
            continue
        elif (group, on_host) not in host:
            continue
        else:
            copies.append(PageCopy(group, on_host, target, kind))
            moved = host[group, on_host]
        for part, content in zip(own, moved, strict=True):
            part[target] = content
    pool.copy_pages(copies)
    for part, wanted in zip(parts_of(pool, len(LAYERS)), expected, strict=True):
        assert torch.equal(part.view(torch.uint8), wanted.view(torch.uint8))


def test_restored_pages_that_evict_others_are_copied_in_two_batches() -> None:
    evicted = [PageCopy(0, page, 20 + page, CopyKind.TO_HOST) for page in range(9)]
    restored = [PageCopy(0, page, page, CopyKind.FROM_HOST) for page in range(9)]
    alternating = [copy for pair in zip(evicted, restored, strict=True) for copy in pair]
    assert list(batches(alternating)) == [evicted, restored]


class Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket in (
            torch.ops.aten.copy_,
            torch.ops.aten.index_select,
            torch.ops.aten.index_copy_,
        )
        return function(*args, **(kwargs or {}))


def test_a_restored_page_is_one_copy_whatever_the_number_of_layers() -> None:
    layers, pages = [LayerCache(Full(), 2, 32, 32)] * 16, 40
    pool = pool_of(
        layers, CacheType.FLOAT16, pages=(pages,), host_pages=(pages,), workspace_bytes=1 << 30
    )
    with Operations() as operations:
        pool.copy_pages([PageCopy(0, page, page, CopyKind.FROM_HOST) for page in range(pages)])
    assert operations.count < pages + 3 * len(layers)
