"""Host memory for pages that the device's prefix cache evicts.

Pages of preempted sequences are in the prefix cache too, so this is also how they are swapped.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.kv.page_group import CopyKind, PageCopy, PageGroup, PageKey


@dataclass(frozen=True, slots=True)
class TransferCosts:
    """Measured costs of copies between device and host, which decide between copying pages and
    computing tokens again."""

    bytes_per_s: float

    def pays(self, nbytes: int, tokens: int, tokens_per_s: float | None) -> bool:
        """`tokens_per_s`: the speed of prefill, None before it is known."""
        return tokens_per_s is None or nbytes * tokens_per_s < tokens * self.bytes_per_s


@dataclass(frozen=True, slots=True)
class HostPages:
    """The number of pages in host memory and the bytes of a page, for each cache group."""

    counts: Sequence[int]
    page_bytes: Sequence[int]
    costs: TransferCosts


class _GroupStore:
    """The host pages of a page group, least recently used first."""

    def __init__(self, group: PageGroup, pages: HostPages) -> None:
        self.free = deque(range(min(pages.counts[number] for number in group.numbers)))
        self.total = len(self.free)
        self.page_bytes = sum(pages.page_bytes[number] for number in group.numbers)
        self.by_key: OrderedDict[PageKey, int] = OrderedDict()


Wanted = Sequence[tuple[PageGroup, Sequence[PageKey]]]


class HostStore:
    """A second tier of the prefix cache: least recently used pages are evicted first.

    Copies are appended to `copies` in the order in which the device must make them, so a host page
    is reused as soon as the copy from it is listed. `tokens_per_s`: the measured speed of prefill.
    """

    def __init__(
        self,
        groups: Sequence[PageGroup],
        pages: HostPages,
        copies: list[PageCopy],
        *,
        page_tokens: int,
    ) -> None:
        self._stores = {group: _GroupStore(group, pages) for group in groups}
        self._costs, self._copies, self._page_tokens = pages.costs, copies, page_tokens
        self.tokens_per_s: float | None = None
        self.stored = self.restored = 0  # pages, in total
        paged = (store for group, store in self._stores.items() if not group.kind.by_sequence)
        self._paged_bytes = sum(store.page_bytes for store in paged)

    @property
    def held(self) -> int:
        return sum(len(store.by_key) for store in self._stores.values())

    def capacity(self, group: PageGroup) -> int:
        """Number of host pages of a group."""
        return self._stores[group].total

    def has(self, group: PageGroup, key: PageKey) -> bool:
        return key in self._stores[group].by_key

    def store(self, group: PageGroup, page: int, key: PageKey) -> None:
        """Keep an evicted page, unless computing it again takes less time than copying it twice.
        States are always kept: each saves the computation of many tokens."""
        mine = self._stores[group]
        if key in mine.by_key:
            mine.by_key.move_to_end(key)
            return
        nbytes, tokens = 2 * self._paged_bytes, self._page_tokens
        pays = group.kind.by_sequence or self._costs.pays(nbytes, tokens, self.tokens_per_s)
        if not pays or not (mine.free or mine.by_key):  # none while all are being restored
            return
        target = mine.free.popleft() if mine.free else mine.by_key.popitem(last=False)[1]
        mine.by_key[key] = target
        self.stored += 1
        self._copy(group, page, target, CopyKind.TO_HOST)

    def affords(self, wanted: Wanted, *, tokens: int) -> bool:
        """Whether the device has room for those `wanted` pages that are on the host only, and
        copying them takes less time than computing `tokens`."""
        nbytes = 0
        for group, keys in wanted:
            resident = [group.by_key[key] for key in keys if key in group.by_key]
            missing = len(keys) - len(resident)
            room = group.available - sum(group.owners[page] == 0 for page in resident)
            if missing + group.kind.by_sequence > room:  # a sequence also needs its own state
                return False
            nbytes += missing * self._stores[group].page_bytes
        return self._costs.pays(nbytes, tokens, self.tokens_per_s)

    def restore(self, wanted: Wanted) -> None:
        """Copy those `wanted` pages that are on the host only into the device's prefix cache. Call
        it only if `affords` returns True."""
        held: list[tuple[PageGroup, PageKey, int]] = []
        for group, keys in wanted:
            for key in keys:
                if key not in group.by_key:
                    held.append((group, key, self._stores[group].by_key.pop(key)))
                elif group.owners[group.by_key[key]] == 0:
                    group.idle.move_to_end(group.by_key[key])  # not to be evicted now
        for group, key, source in held:
            page = group.take()
            self._copy(group, source, page, CopyKind.FROM_HOST)
            group.publish(page, key)
            group.drop(page)
        for group, key, source in held:
            self._stores[group].by_key[key] = source
        self.restored += len(held)

    def check(self) -> None:
        """Assert that no host page is lost."""
        for store in self._stores.values():
            pages = sorted([*store.free, *store.by_key.values()])
            assert pages == list(range(store.total)), "a host page is lost"

    def _copy(self, group: PageGroup, source: int, target: int, kind: CopyKind) -> None:
        self._copies += [PageCopy(number, source, target, kind) for number in group.numbers]
