"""The pages of one cache group: free, cached or owned."""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol

from runtime.engine.request import ImageSpan
from runtime.kv.cache_kinds import CacheKind

PageKey = bytes
FAR = 2**62 - 1  # a position that no sequence has


class PageOwner(Protocol):
    """A sequence as the cache manager sees it; see `runtime.engine.sequence.Sequence`.

    `page_keys`: the key of each full page. Only the manager appends to them; the owner clears them
    when it changes `tokens` other than at the end. Prefixes are shared only among owners with equal
    `cache_salt`, at most 64 bytes.
    """

    tokens: list[int]
    confirmed: int
    page_keys: list[PageKey]

    @property
    def spans(self) -> tuple[ImageSpan, ...]: ...

    @property
    def inserted(self) -> tuple[ImageSpan, ...]: ...

    @property
    def cache_salt(self) -> bytes: ...

    def may_end_at(self, position: int) -> bool: ...


class CopyKind(IntEnum):
    """Which memories a copy reads and writes; page numbers of host and device are separate."""

    ON_DEVICE = 0
    TO_HOST = 1
    FROM_HOST = 2


class PageCopy(NamedTuple):
    """Copy page `source` to page `target` in all layers of `group`; if `cells` is given, only the
    first `cells` cells."""

    group: int
    source: int
    target: int
    kind: CopyKind = CopyKind.ON_DEVICE
    cells: int | None = None


class KeyShift(NamedTuple):
    """Rotate the keys of `page` of `group`, from the cell `first` on, by `by` positions."""

    group: int
    page: int
    first: int
    by: int


@dataclass(slots=True)
class HeldPages:
    """The pages of one sequence in one group: indices begin, begin + 1, ..."""

    begin: int = 0
    pages: list[int] = field(default_factory=list)
    published: int = 0  # pages with lower indices have been published

    @property
    def end(self) -> int:
        return self.begin + len(self.pages)


class PageGroup:
    """The pages of cache groups with the same page numbers. `numbers`: those of the groups.

    Invariant: a page is free, idle (cached, unowned) or owned. `evicted` is called with each
    idle page that is taken, and its key.
    """

    def __init__(self, kind: CacheKind, pages: int, numbers: tuple[int, ...]) -> None:
        self.kind, self.numbers = kind, numbers
        # Whether later rows may see less than earlier ones, so that pages are released meanwhile.
        self.shrinks = kind.by_image or kind.first_visible(FAR) > 0
        self.free = deque(range(pages))
        self.owners = [0] * pages
        self.key_of: dict[int, PageKey] = {}
        self.by_key: dict[PageKey, int] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.held: dict[PageOwner, HeldPages] = {}
        self.evicted: Callable[[PageGroup, int, PageKey], None] = lambda *_: None
        # How often a page became available, or one with an `awaited` key was published or evicted.
        self.changes = 0
        self.awaited: frozenset[PageKey] = frozenset()

    @property
    def available(self) -> int:
        return len(self.free) + len(self.idle)

    def take(self) -> int:
        """A free page; if there is none, the least recently used idle one is evicted."""
        if self.free:
            page = self.free.popleft()
        else:
            page, _ = self.idle.popitem(last=False)
            key = self.key_of.pop(page)
            del self.by_key[key]
            self.changes += key in self.awaited
            self.evicted(self, page, key)
        assert self.owners[page] == 0
        self.owners[page] = 1
        return page

    def share(self, page: int) -> None:
        if self.owners[page] == 0:
            del self.idle[page]
        self.owners[page] += 1

    def drop(self, page: int) -> None:
        self.owners[page] -= 1
        assert self.owners[page] >= 0
        if self.owners[page] == 0:
            self.changes += 1
            if page in self.key_of:
                self.idle[page] = None
            else:
                self.free.append(page)

    def publish(self, page: int, key: PageKey) -> None:
        """Add an owned page to the cache. It replaces an idle page of the same content, which could
        otherwise be evicted before the pages that follow it."""
        known = self.by_key.get(key)
        if page in self.key_of or (known is not None and self.owners[known]):
            return
        self.forget(key)
        self.key_of[page] = key
        self.by_key[key] = page
        self.changes += key in self.awaited

    def check_idle(self) -> None:
        """Assert that each page is either free or idle."""
        assert not any(self.owners) and not self.held, "a page is still owned"
        assert sorted([*self.free, *self.idle]) == list(range(len(self.owners))), "a page is lost"
        cached = {page: key for key, page in self.by_key.items()}
        assert cached == self.key_of and cached.keys() == self.idle.keys(), "a key is lost"

    def forget(self, key: PageKey) -> None:
        """Remove the key from the cache, if it is there; an idle page becomes free."""
        page = self.by_key.pop(key, None)
        if page is not None:
            del self.key_of[page]
            self.changes += key in self.awaited
            if self.owners[page] == 0:
                del self.idle[page]
                self.free.append(page)
