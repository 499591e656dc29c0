"""Prefix hashes and the record of which replica holds which prefix."""

from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from serve_app.messages.replica_load import PrefixHashes
from serve_app.routing.prefix_memory import BOUNDARIES, BYTES_PER_TOKEN, PrefixMemory, hash_prefixes

TEXT = b"The caravan carries salt over the pass, and dates on its way back. " * 200


def memory(*replicas: str, cache_tokens: int = 10_000, max_entries: int = 100_000) -> PrefixMemory:
    made = PrefixMemory(max_entries=max_entries)
    for replica in replicas:
        made.set_clock(replica, computed_tokens=0, cache_tokens=cache_tokens)
    return made


@given(st.binary(max_size=5000), st.binary(max_size=5000), st.binary(max_size=5000))
def test_prompts_share_the_keys_of_their_common_prefix_only(common, first, second):
    one, other = hash_prefixes(common + first), hash_prefixes(common + second)
    same = sum(a == b for a, b in zip(one.keys, other.keys, strict=False))
    assert one.keys[:same] == other.keys[:same]
    shared = next(
        (
            i
            for i, (a, b) in enumerate(zip(common + first, common + second, strict=False))
            if a != b
        ),
        min(len(common + first), len(common + second)),
    )
    assert same == sum(end <= shared for end in BOUNDARIES)


@given(st.integers(0, 200_000))
def test_the_last_boundary_is_at_most_an_eighth_before_the_end(size):
    hashes = hash_prefixes(b"x" * size)
    known = hashes.ends[-1] * BYTES_PER_TOKEN if hashes.ends else 0
    assert size - known < max(128, size / 8)
    assert len(hashes.keys) == len(hashes.ends) < 64
    assert (hashes.tokens - 1) * BYTES_PER_TOKEN < size <= hashes.tokens * BYTES_PER_TOKEN


def test_a_key_is_a_digest_of_the_prefix_and_equal_in_every_process():
    digests = [blake2b(TEXT[:end], digest_size=8).digest() for end in (128, 256)]
    assert hash_prefixes(TEXT[:300]).keys == tuple(map(int.from_bytes, digests))


def test_a_retracted_prompt_leaves_what_was_held_before():
    known = memory("a", "b")
    known.record("a", hash_prefixes(TEXT[:1000]))
    known.record("b", hash_prefixes(TEXT[:4000]))
    held = known.held_tokens("a", hash_prefixes(TEXT[:4000]))
    before = known._entries, set(known._holders)
    for _ in range(2):  # entries that are not there, such as evicted ones, are ignored
        known.record("a", hash_prefixes(TEXT))
        for _ in range(2):
            known.retract("a", hash_prefixes(TEXT), held_tokens=held)
    assert known.held_tokens("a", hash_prefixes(TEXT)) == held
    assert known.holders(hash_prefixes(TEXT), limit=2) == ["b"]
    assert (known._entries, set(known._holders)) == before


def test_holders_of_the_longest_prefix_are_found_latest_first():
    known = memory("a", "b", "c")
    known.record("a", hash_prefixes(TEXT[:4000]))
    known.record("b", hash_prefixes(TEXT[:4000]))
    known.record("c", hash_prefixes(TEXT[:1000]))
    asked = hash_prefixes(TEXT[:8000])
    assert known.holders(asked, limit=4) == ["b", "a"]
    assert known.holders(asked, limit=1) == ["b"]
    assert known.held_tokens("a", asked) > known.held_tokens("c", asked) > 200
    assert known.held_tokens("a", hash_prefixes(b"something else " * 100)) == 0


def test_a_removed_replica_holds_nothing():
    known = memory("a", "b")
    hashes = hash_prefixes(TEXT)
    known.record("a", hashes)
    known.record("b", hashes)
    known.remove("b")
    assert known.holders(hashes, limit=4) == ["a"]
    assert known.held_tokens("b", hashes) == 0
    known.remove("a")
    assert known.holders(hashes, limit=4) == []
    entries = known._entries
    known.record("a", hashes)  # a late report
    assert known._entries == entries


def test_a_prefix_unused_for_as_many_tokens_as_the_cache_holds_counts_as_evicted():
    known = memory("a", cache_tokens=1000)
    old, used = hash_prefixes(TEXT), hash_prefixes(TEXT[::-1])
    known.record("a", old)
    known.record("a", used)
    known.set_clock("a", computed_tokens=999, cache_tokens=1000)
    known.record("a", used)
    assert known.held_tokens("a", old) > 0
    known.set_clock("a", computed_tokens=1001, cache_tokens=1000)
    assert known.held_tokens("a", old) == 0
    assert known.holders(old, limit=4) == []
    assert known.holders(used, limit=4) == ["a"]


def test_a_shorter_prefix_is_found_where_the_longest_counts_as_evicted():
    known = memory("a", "b", cache_tokens=1000)
    known.record("a", path_hashes([0, 1, 2]))
    known.set_clock("a", computed_tokens=1001, cache_tokens=1000)
    known.record("b", path_hashes([0]))
    assert known.holders(path_hashes([0, 1, 2]), limit=4) == ["b"]


def test_a_replica_without_a_prefix_cache_holds_nothing():
    known = memory("a", cache_tokens=0)
    known.record("a", hash_prefixes(TEXT))
    assert known.holders(hash_prefixes(TEXT), limit=4) == []


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 6), min_size=1, max_size=5)),
        max_size=60,
    ),
    st.integers(1, 20),
)
def test_the_number_of_entries_is_bounded_and_held_tokens_end_at_a_boundary(prompts, max_entries):
    """Keys are made of paths: paths with a common beginning share its keys."""
    known = memory(*"abc", max_entries=max_entries)
    prefixes = {key for _, path in prompts for key in path_hashes(path).keys}
    for replica, path in prompts:
        hashes = path_hashes(path)
        known.record(replica, hashes)
        held = (known.holders(PrefixHashes((key,), (1,), 1), limit=3) for key in prefixes)
        assert sum(map(len, held)) <= max_entries
        assert max_entries < 15 or known.held_tokens(replica, hashes) == hashes.tokens
        for other in "abc":
            assert known.held_tokens(other, hashes) in (0, *hashes.ends)


def path_hashes(path: list[int]) -> PrefixHashes:
    keys = tuple(hash(tuple(path[: end + 1])) for end in range(len(path)))
    return PrefixHashes(keys, tuple(range(1, len(path) + 1)), len(path))


def test_the_least_recently_used_prompt_is_evicted_first():
    known = memory("a", max_entries=6)
    for first in range(3):
        known.record("a", path_hashes([first, 1, 2]))
    assert known.held_tokens("a", path_hashes([0, 1, 2])) == 0
    assert known.held_tokens("a", path_hashes([1, 1, 2])) == 3
    assert known.held_tokens("a", path_hashes([2, 1, 2])) == 3


def test_the_longest_prefixes_of_a_prompt_are_evicted_first():
    known = memory("a", max_entries=5)
    for first in range(2):
        known.record("a", path_hashes([first, 1, 2]))
    assert known.held_tokens("a", path_hashes([0, 1, 2])) == 2


def test_entries_that_are_found_evicted_make_room():
    known = memory("a", cache_tokens=1000, max_entries=6)
    known.record("a", path_hashes([0, 1, 2]))
    known.set_clock("a", computed_tokens=1001, cache_tokens=1000)
    assert known.holders(path_hashes([0, 1, 2]), limit=4) == []
    for first in (1, 2):
        known.record("a", path_hashes([first, 1, 2]))
    assert known.held_tokens("a", path_hashes([1, 1, 2])) == 3
    assert known.held_tokens("a", path_hashes([2, 1, 2])) == 3
