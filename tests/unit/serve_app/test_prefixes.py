"""What prompts have in common, and who is known to hold it."""

from hashlib import blake2b

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.routing.prefixes import (
    BOUNDARIES,
    BYTES_PER_TOKEN,
    PrefixHashes,
    PrefixMemory,
    chain_of,
)

TEXT = b"The caravan carries salt over the pass, and dates on its way back. " * 200


def memory(*replicas: str, cache_tokens: int = 10_000, at_most: int = 100_000) -> PrefixMemory:
    made = PrefixMemory(at_most=at_most)
    for replica in replicas:
        made.set_clock(replica, computed_tokens=0, cache_tokens=cache_tokens)
    return made


@settings(deadline=None)
@given(st.binary(max_size=5000), st.binary(max_size=5000), st.binary(max_size=5000))
def test_prompts_share_the_keys_of_what_they_share_and_no_others(common, first, second):
    one, other = chain_of(common + first), chain_of(common + second)
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


@settings(deadline=None)
@given(st.integers(0, 200_000))
def test_what_is_known_of_a_prefix_is_at_most_an_eighth_shorter_than_it(size):
    chain = chain_of(b"x" * size)
    known = chain.ends[-1] * BYTES_PER_TOKEN if chain.ends else 0
    assert size - known < max(128, size / 8)
    assert len(chain.keys) == len(chain.ends) < 64
    assert (chain.tokens - 1) * BYTES_PER_TOKEN < size <= chain.tokens * BYTES_PER_TOKEN


def test_a_key_is_a_digest_of_all_before_its_end_so_every_process_has_the_same():
    digests = [blake2b(TEXT[:end], digest_size=8).digest() for end in (128, 256)]
    assert chain_of(TEXT[:300]).keys == tuple(map(int.from_bytes, digests))


def test_the_longest_known_prefix_is_found_and_the_latest_holder_comes_first():
    known = memory("a", "b", "c")
    known.note("a", chain_of(TEXT[:4000]))
    known.note("b", chain_of(TEXT[:4000]))
    known.note("c", chain_of(TEXT[:1000]))
    asked = chain_of(TEXT[:8000])
    assert known.holders(asked, at_most=4) == ["b", "a"]
    assert known.holders(asked, at_most=1) == ["b"]
    assert known.held_tokens("a", asked) > known.held_tokens("c", asked) > 200
    assert known.held_tokens("a", chain_of(b"something else " * 100)) == 0


def test_a_dead_replica_holds_nothing():
    known = memory("a", "b")
    chain = chain_of(TEXT)
    known.note("a", chain)
    known.note("b", chain)
    known.forget("b")
    assert known.holders(chain, at_most=4) == ["a"]
    assert known.held_tokens("b", chain) == 0
    known.forget("a")
    assert known.holders(chain, at_most=4) == []


def test_what_a_replica_has_not_used_for_a_cache_of_tokens_is_gone():
    known = memory("a", cache_tokens=1000)
    old, used = chain_of(TEXT), chain_of(TEXT[::-1])
    known.note("a", old)
    known.note("a", used)
    known.set_clock("a", computed_tokens=999, cache_tokens=1000)
    known.note("a", used)
    assert known.held_tokens("a", old) > 0
    known.set_clock("a", computed_tokens=1001, cache_tokens=1000)
    assert known.held_tokens("a", old) == 0
    assert known.holders(old, at_most=4) == []
    assert known.holders(used, at_most=4) == ["a"]


def test_a_replica_without_a_prefix_cache_holds_nothing():
    known = memory("a", cache_tokens=0)
    known.note("a", chain_of(TEXT))
    assert known.holders(chain_of(TEXT), at_most=4) == []


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 6), min_size=1, max_size=5)),
        max_size=60,
    ),
    st.integers(1, 20),
)
def test_memory_is_bounded_and_what_is_held_is_a_prefix(prompts, at_most):
    """Keys made of paths: a chain that begins like another has its keys."""
    known = memory(*"abc", at_most=at_most)
    for replica, path in prompts:
        chain = path_chain(path)
        known.note(replica, chain)
        assert len(known) <= at_most
        assert at_most < 15 or known.held_tokens(replica, chain) == chain.tokens
        for other in "abc":
            assert known.held_tokens(other, chain) in (0, *chain.ends)


def path_chain(path: list[int]) -> PrefixHashes:
    keys = tuple(hash(tuple(path[: end + 1])) for end in range(len(path)))
    return PrefixHashes(keys, tuple(range(1, len(path) + 1)), len(path))


def test_of_a_full_memory_the_oldest_goes_first():
    known = memory("a", at_most=6)
    for first in range(3):
        known.note("a", path_chain([first, 1, 2]))
    assert known.held_tokens("a", path_chain([0, 1, 2])) == 0
    assert known.held_tokens("a", path_chain([1, 1, 2])) == 3
    assert known.held_tokens("a", path_chain([2, 1, 2])) == 3


def test_of_a_prompt_the_longest_prefixes_go_first():
    known = memory("a", at_most=5)
    for first in range(2):
        known.note("a", path_chain([first, 1, 2]))
    assert known.held_tokens("a", path_chain([0, 1, 2])) == 2
