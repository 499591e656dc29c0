"""The store of responses in one process: tenants, eviction, age, conversations, copies."""

import random

import pytest

from serve_app.responses.response_store import (
    ENTRY_BYTES,
    RECENT_S,
    ResponseStore,
    StoredResponse,
    StoreLimits,
)
from tests.virtual_time import Clock

ENTRY = 10_000
LIMITS = StoreLimits(max_bytes=8 * ENTRY, tenant_bytes=4 * ENTRY, max_age_s=60.0)
MANY = 2**30


def entry(id: str, previous: str | None = None, size: int = ENTRY) -> StoredResponse:
    return StoredResponse(id, b"r", b"i" * (size - ENTRY_BYTES - 1), previous)


def store_of(*ids: str, tenant: str = "a", clock: Clock | None = None) -> ResponseStore:
    store = ResponseStore(LIMITS, clock=clock or Clock())
    for id in ids:
        assert store.put(tenant, entry(id))
    return store


def has(store: ResponseStore, id: str, tenant: str = "a") -> bool:
    return bool(store.select(tenant, [id], MANY).responses)


def test_entries_are_found_by_their_tenant_only():
    store = store_of("1")
    assert has(store, "1") and not has(store, "1", "b")
    assert store.conversation("b", "1", MANY).missing == "1"
    assert not store.delete("b", "1")
    assert store.delete("a", "1") and not store.delete("a", "1")
    assert (has(store, "1"), store.size) == (False, 0)


def test_a_tenants_least_recently_used_entries_make_room_for_its_new_ones():
    store = store_of("1", "2", "3", "4")
    assert has(store, "1")
    store.put("a", entry("5"))
    assert [id for id in "12345" if has(store, id)] == ["1", "3", "4", "5"]


def test_beyond_the_total_the_largest_tenant_loses_entries():
    store = store_of("1", "2", "3")
    for tenant, ids in (("b", "45"), ("c", "67"), ("d", "8")):
        for id in ids:
            store.put(tenant, entry(id))
    assert store.size == LIMITS.max_bytes
    store.put("d", entry("9"))
    assert not has(store, "1")
    assert has(store, "2") and has(store, "4", "b") and has(store, "9", "d")


def test_an_entry_beyond_the_share_of_a_tenant_is_not_stored():
    store = store_of("1")
    assert not store.put("a", entry("2", size=LIMITS.tenant_bytes + 1))
    assert has(store, "1") and not has(store, "2")


def test_entries_expire_after_their_last_use():
    clock = Clock()
    store = store_of("1", "2", clock=clock)
    clock.now_s += 50
    assert has(store, "1")
    clock.now_s += 50
    store.expire()
    assert store.size == ENTRY
    assert has(store, "1") and not has(store, "2")
    clock.now_s += 61
    assert not has(store, "1")


def test_a_conversation_is_read_from_its_beginning_and_used_as_a_whole():
    store = store_of("1")
    store.put("a", entry("2", "1"))
    store.put("a", entry("3", "2"))
    store.put("a", entry("x"))
    found = store.conversation("a", "3", MANY)
    assert ([each.id for each in found.responses], found.missing) == (["1", "2", "3"], None)
    assert found.size == 3 * (ENTRY - ENTRY_BYTES)
    store.put("a", entry("y"))  # evicts "x", which was not used since
    assert [id for id in "123xy" if has(store, id)] == ["1", "2", "3", "y"]
    store.delete("a", "1")
    found = store.conversation("a", "3", MANY)
    assert ([each.id for each in found.responses], found.missing) == (["2", "3"], "1")


@pytest.mark.parametrize(("max_bytes", "count"), [(2 * ENTRY, 2), (ENTRY, 0)])
def test_more_bytes_than_the_caller_takes_are_not_returned(max_bytes, count):
    found = store_of("1", "2").select("a", ["1", "2"], max_bytes)
    assert (len(found.responses), found.size) == (count, 2 * (ENTRY - ENTRY_BYTES))


def test_a_selection_names_the_first_missing_entry():
    found = store_of("1", "2").select("a", ["2", "8", "1", "9"], MANY)
    assert ([each.id for each in found.responses], found.missing) == (["2", "1"], "8")


def test_copies_keep_tenant_order_and_age():
    clock = Clock()
    store = store_of("1", "2", clock=clock)
    clock.now_s += 40
    store.put("b", entry("3"))
    assert [each.stored.id for each in store.copies(store.ids(), 2 * ENTRY)] == ["1", "2"]
    assert [each.stored.id for each in store.copies(["9", "2", "3"], 1)] == ["2"]
    copy = ResponseStore(LIMITS, clock=clock)
    for each in store.copies(store.ids(), MANY):
        copy.put(each.tenant, each.stored, age_s=each.age_s)
    assert copy.ids() == ["1", "2", "3"]
    clock.now_s += 30
    assert [has(copy, "1"), has(copy, "3", "b")] == [False, True]


def test_a_late_copy_does_not_bring_a_deleted_entry_back():
    clock = Clock()
    store = store_of("1", clock=clock)
    late = store.copies(["1"], MANY)
    store.delete("a", "1")
    store.merge([], late)
    assert not has(store, "1") and store.recently_deleted() == [("a", "1")]
    clock.now_s += RECENT_S + 1
    store.expire()
    assert store.recently_deleted() == []


def test_changes_of_another_process_are_merged():
    clock = Clock()
    limits = StoreLimits(LIMITS.max_bytes, LIMITS.tenant_bytes, max_age_s=10 * RECENT_S)
    store, copy = (ResponseStore(limits, clock=clock) for _ in range(2))
    for each in (store, copy):
        each.put("a", entry("old"))
        each.put("b", entry("deleted"))
    clock.now_s += RECENT_S + 1
    store.delete("b", "deleted")
    store.put("a", entry("new"))
    assert store.recent_ids() == ["new"]
    for _ in range(2):
        copy.merge(store.recently_deleted(), store.copies(store.recent_ids(), MANY))
        assert copy.ids() == ["old", "new"]


def test_random_operations_keep_the_limits_and_the_count():
    rng, clock = random.Random(5), Clock()
    store = ResponseStore(LIMITS, clock=clock)
    kept: dict[str, tuple[str, int]] = {}
    for _ in range(2000):
        tenant, id = rng.choice("abc"), str(rng.randrange(40))
        clock.now_s += rng.random()
        if rng.random() < 0.6:
            size = rng.randrange(ENTRY_BYTES + 1, 2 * ENTRY)
            if store.put(tenant, entry(id, size=size)):
                kept[id] = tenant, size
        elif rng.random() < 0.5:
            store.delete(tenant, id)
        else:
            store.select(tenant, [id], MANY)
        sizes = [kept[each] for each in store.ids()]
        assert store.size == sum(size for _, size in sizes) <= LIMITS.max_bytes
        for each in "abc":
            assert sum(size for owner, size in sizes if owner == each) <= LIMITS.tenant_bytes
