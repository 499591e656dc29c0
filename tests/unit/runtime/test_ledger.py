"""Who owns a page: sharing, publishing, trimming, and what is taken back first."""

from dataclasses import dataclass, field

from runtime.kv.ledger import PageGrant, PageLedger
from runtime.kv.spec import CacheKind, Chunked, Full, Sliding
from runtime.request import ImageSpan


@dataclass(eq=False)
class Owner:
    tokens: list[int]
    confirmed: int = 0
    spans: tuple[ImageSpan, ...] = ()
    page_keys: list[bytes] = field(default_factory=list)

    def may_end_at(self, position: int) -> bool:
        return not any(s.whole and s.start < position < s.end for s in self.spans)


def ledger_of(*kinds: CacheKind, pages: int = 8) -> PageLedger:
    return PageLedger(kinds, [pages] * len(kinds), page_tokens=4)


def compute(ledger: PageLedger, owner: Owner, end: int) -> None:
    """Reserve up to `end` and pretend that a step has computed it."""
    assert ledger.reserve(owner, end) is not None
    owner.confirmed = end
    ledger.publish(owner)
    ledger.trim(owner)


def test_reserve_grants_only_what_is_missing() -> None:
    ledger, owner = ledger_of(Full()), Owner([1] * 20)
    assert ledger.reserve(owner, 5) == [PageGrant(0, 0, 0), PageGrant(0, 1, 1)]
    assert ledger.reserve(owner, 8) == []
    assert ledger.reserve(owner, 9) == [PageGrant(0, 2, 2)]


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    ledger = ledger_of(Full(), Sliding(4), pages=2)
    owner = Owner([1] * 20)
    assert ledger.reserve(owner, 12) is None
    assert ledger.pages_owned == 0
    ledger.check_idle()


def test_a_prefix_is_shared_in_whole_pages_and_leaves_a_token_to_compute() -> None:
    ledger, first = ledger_of(Full()), Owner(list(range(12)))
    compute(ledger, first, 12)
    second = Owner(list(range(12)))
    length, grants = ledger.adopt(second)
    assert length == 8
    assert grants == [PageGrant(0, 0, 0), PageGrant(0, 1, 1)]
    assert ledger.pages_owned == 3


def test_a_prefix_survives_its_owner_until_pages_run_short() -> None:
    ledger, first = ledger_of(Full(), pages=3), Owner(list(range(12)))
    compute(ledger, first, 12)
    ledger.release(first)
    other = Owner([99] * 4)
    compute(ledger, other, 4)  # takes the end of the cached prefix, the least useful page
    again = Owner([*range(12), 0])
    assert ledger.adopt(again)[0] == 8
    ledger.release(again)
    ledger.release(other)
    ledger.check_idle()


def test_equal_pages_after_different_prefixes_are_not_confused() -> None:
    ledger, first = ledger_of(Full()), Owner([1, 1, 1, 1, 5, 6, 7, 8])
    compute(ledger, first, 8)
    assert ledger.adopt(Owner([2, 2, 2, 2, 5, 6, 7, 8, 9]))[0] == 0


def test_a_sliding_group_keeps_a_bounded_number_of_pages() -> None:
    ledger, owner = ledger_of(Sliding(6), pages=4), Owner([1] * 200)
    for end in range(1, 200):
        compute(ledger, owner, end)
        assert ledger.pages_owned <= 3
    ledger.release(owner)
    ledger.check_idle()


def test_a_prefix_hit_needs_only_the_pages_that_the_window_still_sees() -> None:
    ledger = ledger_of(Full(), Sliding(5), pages=6)
    first = Owner(list(range(16)))
    for end in (4, 8, 12, 16):
        compute(ledger, first, end)
    length, grants = ledger.adopt(Owner([*range(16), 99]))
    assert length == 16
    assert [g.index for g in grants if g.group == 0] == [0, 1, 2, 3]
    assert [g.index for g in grants if g.group == 1] == [3]


def test_a_chunked_group_lets_go_of_finished_chunks() -> None:
    ledger, owner = ledger_of(Chunked(8), pages=3), Owner([1] * 40)
    for end in range(1, 40):
        compute(ledger, owner, end)
        assert ledger.pages_owned <= 3


def test_images_are_told_apart_by_digest_and_a_prefix_never_ends_inside_a_whole_one() -> None:
    ledger = ledger_of(Full())

    def with_image(digest: bytes, whole: bool) -> Owner:
        return Owner([7] * 13, spans=(ImageSpan(2, 8, whole, digest),))

    compute(ledger, with_image(b"cat", False), 13)
    assert ledger.adopt(with_image(b"dog", False))[0] == 0
    assert ledger.adopt(with_image(b"cat", False))[0] == 12
    whole = ledger_of(Full())
    compute(whole, with_image(b"cat", True), 8)
    assert whole.adopt(with_image(b"cat", True))[0] == 0


def test_without_prefix_cache_nothing_is_kept() -> None:
    ledger = PageLedger([Full()], [8], page_tokens=4, prefix_cache=False)
    first = Owner(list(range(12)))
    compute(ledger, first, 12)
    ledger.release(first)
    assert ledger.adopt(Owner(list(range(12)))) == (0, [])
