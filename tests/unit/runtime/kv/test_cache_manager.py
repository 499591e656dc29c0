"""Ownership of pages: sharing, publishing, trimming, and the order of eviction."""

from dataclasses import dataclass, field

import pytest

from runtime.engine.request import ImageSpan
from runtime.kv.cache_kinds import CacheKind, Chunked, Cross, Full, Sliding
from runtime.kv.cache_manager import KVCacheManager, PageGrant


@dataclass(eq=False)
class Owner:
    tokens: list[int]
    confirmed: int = 0
    spans: tuple[ImageSpan, ...] = ()
    page_keys: list[bytes] = field(default_factory=list)
    inserted: tuple[ImageSpan, ...] = ()
    cache_salt: bytes = b""

    def may_end_at(self, position: int) -> bool:
        return not any(s.whole and s.start < position < s.end for s in self.spans)


def ledger_of(*kinds: CacheKind, pages: int = 8) -> KVCacheManager:
    return KVCacheManager(kinds, [pages] * len(kinds), page_tokens=4)


def compute(cache_manager: KVCacheManager, owner: Owner, end: int) -> None:
    """Reserve up to `end`, as if a step had computed it."""
    assert cache_manager.reserve(owner, end) is not None
    owner.confirmed = end
    cache_manager.publish(owner)
    cache_manager.trim(owner)


def test_reserve_grants_only_what_is_missing() -> None:
    cache_manager, owner = ledger_of(Full()), Owner([1] * 20)
    assert cache_manager.reserve(owner, 5) == [PageGrant(0, 0, 0), PageGrant(0, 1, 1)]
    assert cache_manager.reserve(owner, 8) == []
    assert cache_manager.reserve(owner, 9) == [PageGrant(0, 2, 2)]


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    cache_manager = ledger_of(Full(), Sliding(4), pages=2)
    owner = Owner([1] * 20)
    assert cache_manager.reserve(owner, 12) is None
    assert cache_manager.pages_owned == 0
    cache_manager.check_idle()


def test_a_prefix_is_shared_in_whole_pages_and_leaves_a_token_to_compute() -> None:
    cache_manager, first = ledger_of(Full()), Owner(list(range(12)))
    compute(cache_manager, first, 12)
    second = Owner(list(range(12)))
    length, grants = cache_manager.adopt(second)
    assert length == 8
    assert grants == [PageGrant(0, 0, 0), PageGrant(0, 1, 1)]
    assert cache_manager.pages_owned == 3


def test_a_prefix_stays_cached_until_pages_run_short() -> None:
    cache_manager, first = ledger_of(Full(), pages=3), Owner(list(range(12)))
    compute(cache_manager, first, 12)
    cache_manager.release(first)
    other = Owner([99] * 4)
    compute(cache_manager, other, 4)  # takes the end of the cached prefix, the least useful page
    again = Owner([*range(12), 0])
    assert cache_manager.adopt(again)[0] == 8
    cache_manager.release(again)
    cache_manager.release(other)
    cache_manager.check_idle()


def test_a_prompt_is_hashed_only_as_far_as_it_is_cached() -> None:
    cache_manager = ledger_of(Full(), Sliding(6))
    compute(cache_manager, Owner(list(range(12))), 12)
    for cached, length in ((0, 0), (8, 8), (12, 12)):
        owner = Owner([*range(cached), *[99] * 1000])
        assert cache_manager.cached_prefix(owner) == length
        assert len(owner.page_keys) == length // 4 + 1


def test_equal_pages_after_different_prefixes_are_not_confused() -> None:
    cache_manager, first = ledger_of(Full()), Owner([1, 1, 1, 1, 5, 6, 7, 8])
    compute(cache_manager, first, 8)
    assert cache_manager.adopt(Owner([2, 2, 2, 2, 5, 6, 7, 8, 9]))[0] == 0


def test_a_prefix_is_shared_only_under_the_same_salt() -> None:
    cache_manager, first = ledger_of(Full(), Sliding(6)), Owner([1] * 12, cache_salt=b"one")
    compute(cache_manager, first, 12)
    for salt, shared in ((b"two", 0), (b"", 0), (b"one", 8)):
        assert cache_manager.adopt(Owner([1] * 12, cache_salt=salt))[0] == shared, salt


@pytest.mark.parametrize("text", [(Full(),), ()], ids=["beside text", "alone"])
def test_rows_of_images_are_shared_only_under_the_same_salt(text: tuple[CacheKind, ...]) -> None:
    image = ImageSpan(1, 1, False, b"x", cross_rows=4)
    cache_manager = ledger_of(*text, Cross(1, 4, alignment=4))
    compute(cache_manager, Owner([1] * 12, spans=(image,), cache_salt=b"one"), 12)
    for salt, shared in ((b"two", 0), (b"one", 8)):
        owner = Owner([1] * 12, spans=(image,), cache_salt=salt)
        assert cache_manager.adopt(owner)[0] == shared, salt


def test_a_sliding_group_keeps_a_bounded_number_of_pages() -> None:
    cache_manager, owner = ledger_of(Sliding(6), pages=4), Owner([1] * 200)
    for end in range(1, 200):
        compute(cache_manager, owner, end)
        assert cache_manager.pages_owned <= 3
    cache_manager.release(owner)
    cache_manager.check_idle()


def test_a_prefix_hit_needs_only_the_pages_that_the_window_still_sees() -> None:
    cache_manager = ledger_of(Full(), Sliding(5), pages=6)
    first = Owner(list(range(16)))
    for end in (4, 8, 12, 16):
        compute(cache_manager, first, end)
    length, grants = cache_manager.adopt(Owner([*range(16), 99]))
    assert length == 16
    assert [g.index for g in grants if g.group == 0] == [0, 1, 2, 3]
    assert [g.index for g in grants if g.group == 1] == [3]


def test_a_chunked_group_releases_finished_chunks() -> None:
    cache_manager, owner = ledger_of(Chunked(8), pages=3), Owner([1] * 40)
    for end in range(1, 40):
        compute(cache_manager, owner, end)
        assert cache_manager.pages_owned <= 3


def test_images_are_told_apart_by_digest_and_a_prefix_never_ends_inside_a_whole_one() -> None:
    cache_manager = ledger_of(Full())

    def with_image(digest: bytes, whole: bool) -> Owner:
        return Owner([7] * 13, spans=(ImageSpan(2, 8, whole, digest),))

    compute(cache_manager, with_image(b"cat", False), 13)
    assert cache_manager.adopt(with_image(b"dog", False))[0] == 0
    assert cache_manager.adopt(with_image(b"cat", False))[0] == 12
    whole = ledger_of(Full())
    compute(whole, with_image(b"cat", True), 8)
    assert whole.adopt(with_image(b"cat", True))[0] == 0


def test_without_prefix_cache_nothing_is_kept() -> None:
    cache_manager = KVCacheManager([Full()], [8], page_tokens=4, prefix_cache=False)
    first = Owner(list(range(12)))
    compute(cache_manager, first, 12)
    cache_manager.release(first)
    assert cache_manager.adopt(Owner(list(range(12)))) == (0, [])


CROSS = Cross(4, 8, alignment=4)


def test_cacheable_tokens_are_those_of_the_largest_group() -> None:
    cache_manager = KVCacheManager([Sliding(8), Full()], [4, 8], page_tokens=4)
    assert cache_manager.cacheable_tokens == 32
    cache_manager = KVCacheManager([Full()], [8], page_tokens=4, prefix_cache=False)
    assert cache_manager.cacheable_tokens == 0


def with_images(*images: tuple[int, bytes, int], tokens: int = 13) -> Owner:
    """An owner whose images, of one position each, are (position, digest, rows)."""
    spans = tuple(ImageSpan(at, 1, False, digest, rows) for at, digest, rows in images)
    return Owner([7] * tokens, spans=spans)


def test_a_cross_group_reserves_pages_at_the_start_of_an_image() -> None:
    cache_manager = ledger_of(CROSS)
    owner = with_images((5, b"cat", 6), (9, b"dog", 3))
    assert cache_manager.reserve(owner, 5) == []
    assert [grant.index for grant in cache_manager.reserve(owner, 6) or ()] == [0, 1]
    assert cache_manager.reserve(owner, 9) == []
    assert [grant.index for grant in cache_manager.reserve(owner, 13) or ()] == [2]


def test_images_that_no_later_row_sees_are_released() -> None:
    cache_manager = ledger_of(Full(), CROSS)
    owner = with_images((1, b"cat", 8), (9, b"dog", 3))
    compute(cache_manager, owner, 8)
    assert cache_manager.pages_owned == 2 + 2  # of the text, of the cat
    compute(cache_manager, owner, 9)
    assert cache_manager.pages_owned == 3  # the next row is the dog's, and sees no cat
    compute(cache_manager, owner, 10)
    assert cache_manager.pages_owned == 3 + 1


def test_a_prefix_hit_shares_the_rows_of_its_images() -> None:
    cache_manager = ledger_of(Full(), CROSS)
    first = with_images((2, b"cat", 6))
    compute(cache_manager, first, 13)
    length, grants = cache_manager.adopt(with_images((2, b"cat", 6), tokens=20))
    assert length == 12
    assert [grant.index for grant in grants if grant.group == 1] == [0, 1]


def test_without_the_rows_of_its_images_a_prefix_does_not_count() -> None:
    cache_manager = KVCacheManager([Full(), CROSS], [8, 2], page_tokens=4)
    first = with_images((6, b"cat", 6))
    compute(cache_manager, first, 13)
    cache_manager.release(first)
    other = with_images((0, b"dog", 6), tokens=1)
    compute(cache_manager, other, 1)  # takes the cat's pages
    cache_manager.release(other)
    length, _ = cache_manager.adopt(with_images((6, b"cat", 6)))
    assert length == 4, "the text before the image is still good"


def test_rows_of_images_are_told_apart_by_digest_and_order() -> None:
    cache_manager = ledger_of(Full(), CROSS, pages=20)
    compute(cache_manager, with_images((2, b"cat", 3), (3, b"dog", 3)), 13)
    assert cache_manager.adopt(with_images((2, b"dog", 3), (3, b"cat", 3)))[0] == 0
    assert cache_manager.adopt(with_images((2, b"cat", 3), (3, b"cow", 3)))[0] == 0
    assert cache_manager.adopt(with_images((2, b"cat", 3), (3, b"dog", 3)))[0] == 12


def test_text_before_other_images_is_another_prefix_with_a_lead_in() -> None:
    cache_manager = ledger_of(Full(), Cross(4, 8, lead_in=True, alignment=4), pages=20)
    compute(cache_manager, with_images((6, b"cat", 3)), 13)
    assert cache_manager.adopt(with_images((6, b"dog", 3)))[0] == 0
    assert cache_manager.adopt(with_images())[0] == 0
    assert cache_manager.adopt(with_images((6, b"cat", 3)))[0] == 12


def test_parts_of_an_image_are_told_apart_by_the_rows_they_are() -> None:
    cache_manager = ledger_of(Full())
    first = Owner([0] * 12, spans=(ImageSpan(0, 4, False, b"x"),))
    compute(cache_manager, first, 12)
    same = Owner([0] * 12, spans=(ImageSpan(0, 4, False, b"x"),))
    other = Owner([0] * 12, spans=(ImageSpan(0, 4, False, b"x", first_row=4),))
    assert cache_manager.cached_prefix(same) == 8 and cache_manager.cached_prefix(other) == 0


def test_looking_up_a_prefix_reserves_nothing() -> None:
    cache_manager, first = ledger_of(Full()), Owner(list(range(12)))
    compute(cache_manager, first, 12)
    cache_manager.release(first)
    second = Owner(list(range(12)))
    assert cache_manager.cached_prefix(second) == 8
    cache_manager.check_idle()
    assert cache_manager.adopt(second)[0] == 8


def test_needed_images_are_inserted_ones_and_those_for_cross_attention() -> None:
    inside = ImageSpan(2, 5, False, b"a"), ImageSpan(9, 2, True, b"b")
    owner = Owner([0] * 12, spans=inside, inserted=inside)
    cache_manager = ledger_of(Full())
    assert cache_manager.images_needed(owner, 0, 2) == ()
    assert cache_manager.images_needed(owner, 6, 10) == (b"a", b"b")
    assert (
        cache_manager.images_needed(owner, 7, 9) == () == cache_manager.images_needed(owner, 11, 12)
    )
    beside = ImageSpan(2, 1, False, b"a", 3), ImageSpan(9, 1, False, b"b", 3)
    owner = Owner([0] * 12, spans=beside)
    cache_manager = ledger_of(Full(), Cross(2, 3, alignment=4))
    assert cache_manager.images_needed(owner, 0, 3) == (b"a",)
    assert cache_manager.images_needed(owner, 3, 9) == ()
    cache_manager = ledger_of(Full(), Cross(2, 3, lead_in=True, alignment=4))
    assert cache_manager.images_needed(owner, 0, 1) == (b"a", b"b")
    assert cache_manager.images_needed(owner, 1, 12) == ()
