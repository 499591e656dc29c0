"""Pages in host memory: which are kept, copied back and evicted, and in which order."""

import pytest
import torch

from runtime.engine.host_memory import host_page_counts
from runtime.kv.cache_kinds import Full, Sliding
from runtime.kv.cache_layout import CacheLayout
from runtime.kv.cache_manager import KVCacheManager
from runtime.kv.cache_types import CacheType
from runtime.kv.host_store import HostPages, TransferCosts
from runtime.kv.page_group import CopyKind, PageCopy
from runtime.kv.pool import KVPool, page_bytes
from runtime.kv.states import Recurrent
from tests.unit.runtime.engine.test_memory_plan import FULL, LOCAL
from tests.unit.runtime.engine.test_recurrent_states import RULES, STATE, computed, sequence_of

PROMPTS = [list(range(n, n + 25)) for n in (100, 200, 300)]
FULL_ONLY = (Full(),)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def managed(host: int, kinds=FULL_ONLY, *, pages: int = 8, costs: float = 1e9) -> KVCacheManager:
    return KVCacheManager(
        kinds,
        [4 if kind.by_sequence else pages for kind in kinds],
        page_tokens=4,
        checkpoint_rules=RULES,
        host_pages=HostPages([host] * len(kinds), [100] * len(kinds), TransferCosts(costs)),
    )


def compute_in_turn(manager: KVCacheManager, prompts: list[list[int]], salt: bytes = b"") -> None:
    for prompt in prompts:
        computed(manager, one := sequence_of(prompt, salt))
        manager.release(one)


@pytest.mark.parametrize(
    ("host", "cached"), [(20, [24, 24, 24]), (8, [12, 24, 24]), (0, [0, 4, 24])]
)
def test_as_many_evicted_pages_come_back_as_the_host_has_room_for(host, cached) -> None:
    """18 pages were published, and 7 of them, the ends of prompts last, are on the device."""
    manager = managed(host)
    assert manager.cacheable_tokens == 4 * (8 + host)
    compute_in_turn(manager, PROMPTS)
    again = [manager.cached_prefix(sequence_of(prompt)) for prompt in PROMPTS]
    assert again == cached
    manager.check_idle()


@pytest.mark.parametrize("kinds", [[Full(), Recurrent()], [Recurrent(), Full(), Sliding(9)]])
def test_states_come_back_with_the_pages_before_them(kinds) -> None:
    manager = managed(40, kinds)
    compute_in_turn(manager, [*PROMPTS, list(range(400, 425)), list(range(500, 525))])
    assert manager.host_store is not None
    for prompt in PROMPTS:
        length, _ = manager.adopt(one := sequence_of([*prompt[:24], 7]))
        assert length == 20
        assert manager.reserve(one, 25) is not None
        manager.release(one)
    manager.check_idle()
    assert manager.host_store.restored > 0


def test_copies_that_take_longer_than_computing_are_not_made() -> None:
    cheap, dear = managed(20, costs=1e4), managed(20, costs=1e4)
    for manager, speed in ((cheap, 10.0), (dear, 10_000.0)):
        compute_in_turn(manager, PROMPTS)
        manager.note_prefill_speed(speed)
    assert cheap.cached_prefix(sequence_of(PROMPTS[0])) == 24
    assert dear.cached_prefix(sequence_of(PROMPTS[0])) == 0
    assert dear.host_store is not None
    before = dear.host_store.stored
    compute_in_turn(dear, PROMPTS)
    assert dear.host_store.stored == before


@pytest.mark.parametrize(("speed", "cached"), [(350.0, 24), (450.0, 4)])
def test_what_the_device_still_has_pays_no_copy(speed: float, cached: int) -> None:
    """20 of 24 tokens are on the host only, in five pages of 100 bytes: 500 take 0.05 s."""
    manager = managed(20, costs=1e4)
    compute_in_turn(manager, PROMPTS[:2])
    manager.note_prefill_speed(speed)
    assert manager.cached_prefix(sequence_of(PROMPTS[0])) == cached


def test_states_do_not_count_for_the_copies_of_pages() -> None:
    """Four tokens take 0.027 s, and the 100 bytes of their page 0.02 s there and back."""
    manager = managed(20, [Full(), Recurrent()], costs=1e4)
    manager.note_prefill_speed(150.0)
    compute_in_turn(manager, PROMPTS)
    kinds = {copy.kind for copy in manager.take_copies() if copy.group == 0}
    assert kinds == {CopyKind.TO_HOST}


def test_another_salt_finds_nothing_on_the_host() -> None:
    manager = managed(40)
    compute_in_turn(manager, PROMPTS, b"a")
    assert [manager.cached_prefix(sequence_of(PROMPTS[0], salt)) for salt in (b"a", b"b")] == [
        24,
        0,
    ]


def test_without_room_on_the_device_a_prefix_stays_on_the_host() -> None:
    manager = managed(20)
    compute_in_turn(manager, PROMPTS[:2])
    other = sequence_of(range(500, 511))
    assert manager.reserve(other, 11) is not None
    assert manager.cached_prefix(sequence_of(PROMPTS[0])) == 0
    manager.release(other)
    assert manager.cached_prefix(sequence_of(PROMPTS[0])) == 24


def test_pages_have_the_same_content_after_a_stay_on_the_host() -> None:
    layout = CacheLayout.of([FULL, LOCAL, STATE, STATE], page_tokens=16)
    pool = KVPool(
        layout,
        pages=(4, 3, 5),
        slots=2,
        pages_per_sequence=2,
        type=CacheType.Q8_0,
        device=CPU,
        host_pages=(2, 1, 3),
    )
    for group, layers in enumerate(((0,), (1,), (2, 3))):
        for layer in layers:
            for part in (pool.layer(layer).keys, pool.layer(layer).values):
                part[0].copy_(torch.randint(0, 100, part[0].shape))
        pool.copy_pages(
            [
                PageCopy(group, 0, 0, CopyKind.TO_HOST),
                PageCopy(group, 1, 0),
                PageCopy(group, 0, 2, CopyKind.FROM_HOST),
            ]
        )
        for layer in layers:
            for part in (pool.layer(layer).keys, pool.layer(layer).values):
                assert part[2].any() and not part[0].any()


def test_the_budget_is_divided_like_the_pages_of_the_device(monkeypatch) -> None:
    layout = CacheLayout.of([FULL, STATE], page_tokens=16)
    sizes = [page_bytes(layout, group, CacheType.FLOAT32) for group in (0, 1)]

    def counts(budget: int | None, device: torch.device = CPU, ranks: int = 1) -> tuple[int, ...]:
        return host_page_counts(
            layout,
            (100, 10),
            CacheType.FLOAT32,
            device=device,
            budget_bytes=budget,
            machine_ranks=ranks,
        )

    whole = 100 * sizes[0] + 10 * sizes[1]
    assert counts(whole // 2) == (50, 5) and counts(0) == counts(None) == (0, 0)
    monkeypatch.setattr("runtime.engine.host_memory.available_bytes", lambda device: 1 << 40)
    assert counts(None, CUDA) == counts(4 << 30, CUDA) == counts((8 << 30) - 1, CUDA)
    assert counts(None, CUDA, 2) == counts(2 << 30, CUDA)
    monkeypatch.setattr("runtime.engine.host_memory.available_bytes", lambda device: 1 << 30)
    assert counts(None, CUDA) == counts(1 << 26, CUDA)
