"""After which changes an owner without pages is tried again."""

import pytest

from runtime.kv.cache_kinds import Full
from runtime.kv.page_group import PageGroup
from runtime.kv.page_shortage import PageShortage

OWNER, SIZES = object(), (10, 3)


@pytest.fixture
def group() -> PageGroup:
    """Page 0 is idle with the key "old", page 1 is owned, and none is free."""
    group = PageGroup(Full(), 2, (0,))
    group.publish(group.take(), b"old")
    group.drop(0)
    group.take()
    return group


@pytest.fixture
def shortage(group) -> PageShortage:
    shortage = PageShortage([group])
    shortage.note(OWNER, [b"old", b"next"], SIZES)
    assert shortage.persists(OWNER, SIZES)
    return shortage


def test_it_persists_while_pages_change_that_the_owner_cannot_use(group, shortage) -> None:
    group.publish(1, b"other")
    group.share(1)
    group.drop(1)
    group.share(0)
    group.forget(b"other")
    assert shortage.persists(OWNER, SIZES) and shortage.persists(OWNER, (11, 3))


def test_it_ends_when_a_page_is_released(group, shortage) -> None:
    group.drop(1)
    assert not shortage.persists(OWNER, SIZES)


def test_it_ends_when_a_page_of_the_owners_prompt_is_published_or_evicted(group, shortage) -> None:
    group.publish(1, b"next")
    assert not shortage.persists(OWNER, SIZES)
    shortage.note(OWNER, [b"old", b"next"], SIZES)
    group.take()  # page 0
    assert not shortage.persists(OWNER, SIZES)
    shortage.note(OWNER, [b"old", b"next"], SIZES)
    group.forget(b"next")
    assert not shortage.persists(OWNER, SIZES)


def test_it_says_nothing_of_a_smaller_need_or_another_owner(shortage) -> None:
    assert not shortage.persists(OWNER, (10, 2))
    assert not shortage.persists(object(), SIZES)
