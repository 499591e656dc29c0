"""Remembers a failed reservation, so that it is not repeated before it can succeed."""

from collections.abc import Sequence
from operator import ge

from runtime.kv.page_group import PageGroup, PageKey


class PageShortage:
    """The last owner for which there were too few pages.

    Another attempt can succeed once a page has become available, a page that the owner could share
    has been published or evicted, or the owner would need fewer pages.
    """

    def __init__(self, groups: Sequence[PageGroup]) -> None:
        self._groups = groups
        self._owner: object = None
        self._sizes: tuple[int, ...] = ()
        self._changes = 0

    def note(self, owner: object, keys: Sequence[PageKey], sizes: tuple[int, ...]) -> None:
        """An attempt has failed, and the owner has no pages. `keys`: of the pages that it could
        share; the last one may be that of the first page that is not cached. `sizes`: numbers of
        any kind that determine, with what is cached, how many pages it needs: the lower, the fewer.
        """
        awaited = frozenset(keys)
        for group in self._groups:
            group.awaited = awaited
        self._owner, self._sizes, self._changes = owner, sizes, self._counted()

    def persists(self, owner: object, sizes: tuple[int, ...]) -> bool:
        """Whether an attempt of the owner would fail again."""
        return (
            owner is self._owner
            and self._changes == self._counted()
            and all(map(ge, sizes, self._sizes))
        )

    def _counted(self) -> int:
        return sum(group.changes for group in self._groups)
