"""Which pages move to lower indices when positions are cut, and which positions are copied."""

import pytest

from runtime.engine.context_shift import ContextCut
from runtime.kv.cache_kinds import Chunked, Cross, Full, Sliding
from runtime.kv.cache_manager import KVCacheManager
from runtime.kv.page_group import KeyShift, PageCopy
from runtime.kv.page_shift import can_move
from runtime.kv.states import Recurrent
from tests.unit.runtime.kv.test_cache_manager import Owner, compute

SIZE = 4


@pytest.mark.parametrize(
    ("kind", "cut", "moves"),
    [
        (Full(), (4, 20), True),
        (Full(), (5, 21), True),
        (Full(), (4, 18), False),  # not a number of pages
        (Sliding(9), (4, 20), True),
        (Sliding(20), (4, 20), True),  # rows see the moved ones and nothing before them
        (Sliding(21), (4, 20), False),  # they would see a kept one, whose page may be gone
        (Sliding(99), (4, 20), True),  # they see all
        (Chunked(8), (4, 20), True),
        (Chunked(16), (4, 20), True),
        (Chunked(6), (4, 20), False),  # chunks begin elsewhere
        (Chunked(99), (4, 20), True),
        (Cross(1, 4), (4, 20), False),
        (Recurrent(), (4, 20), False),
    ],
)
def test_pages_move_only_if_they_hold_what_later_rows_attend_to(kind, cut, moves) -> None:
    assert can_move([Full(), kind], ContextCut(*cut), 39, page_tokens=SIZE) == moves


def test_later_pages_move_down_and_kept_positions_are_copied_into_the_first() -> None:
    manager = KVCacheManager([Full(), Sliding(6)], [12, 12], page_tokens=SIZE, moves_keys=True)
    owner = Owner(list(range(40)))
    compute(manager, owner, 39)
    moved = manager.shift(owner, ContextCut(5, 21))
    assert moved is not None
    # Pages 5 to 9 become 1 to 5; one position of page 1 stays. The window begins in page 8.
    assert moved.pages == (
        *((0, index, index + 4) for index in range(1, 6)), (1, 4, 8), (1, 5, 9),
    )  # fmt: skip
    assert moved.copies == (PageCopy(0, 1, 5, cells=1),)
    assert moved.key_shifts == (
        KeyShift(0, 5, 1, -16),
        *(KeyShift(0, page, 0, -16) for page in range(6, 10)),
        *(KeyShift(1, page, 0, -16) for page in (8, 9)),
    )
    owner.tokens[5:21] = []
    owner.confirmed = 23
    assert [(g.group, g.index) for g in manager.reserve(owner, 25) or ()] == [(0, 6), (1, 6)]
    assert manager.cached_prefix(Owner(list(range(40)))) == 20, "what has moved is not cached"
    manager.release(owner)
    manager.check_idle()


@pytest.mark.parametrize("pages", [10, 15])
def test_pages_of_others_are_copied_if_there_is_room(pages: int) -> None:
    manager = KVCacheManager([Full()], [pages], page_tokens=SIZE, moves_keys=True)
    first, second = Owner(list(range(40))), Owner(list(range(40)))
    compute(manager, first, 39)
    assert manager.adopt(second)[0] == 36
    moved = manager.shift(first, ContextCut(4, 20))
    if pages == 10:
        assert moved is None
    else:
        assert moved is not None
        assert moved.copies == tuple(PageCopy(0, page, page + 5) for page in range(5, 9))
        assert [page for _, _, page in moved.pages] == [10, 11, 12, 13, 9]
    for owner in (first, second):
        manager.release(owner)
    assert manager.cached_prefix(Owner(list(range(40)))) == 36, "what was published is unchanged"
    manager.check_idle()
