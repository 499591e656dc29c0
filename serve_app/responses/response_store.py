"""Responses that OpenAI's protocol can continue or retrieve, in the memory of one process."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

# Estimated memory of an entry besides its texts; it limits the number of entries.
ENTRY_BYTES = 2048
# How long changes are kept for processes that start: longer than such a process copies entries and
# waits to be listed.
RECENT_S = 180.0


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`response`: the response object as JSON. `items`: the items of its input as a JSON list.
    `previous`: the id of the response that it continues.
    """

    id: str
    response: bytes
    items: bytes
    previous: str | None = None

    @property
    def size(self) -> int:
        return len(self.response) + len(self.items) + ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """`max_bytes`: limit of all entries; `tenant_bytes`: limit of one tenant's entries.
    `max_age_s`: maximum time since an entry was stored or last used."""

    max_bytes: int
    tenant_bytes: int
    max_age_s: float


@dataclass(frozen=True, slots=True)
class Selection:
    """The result of reading entries. `missing`: the first id that is not stored.

    `size`: bytes of the entries' texts; if they exceed the caller's limit, `responses` is empty.
    """

    responses: tuple[StoredResponse, ...] = ()
    size: int = 0
    missing: str | None = None


@dataclass(frozen=True, slots=True)
class ReplicatedEntry:
    """An entry as one process sends it to another."""

    tenant: str
    stored: StoredResponse
    age_s: float


@dataclass(slots=True)
class _Entry:
    tenant: str
    stored: StoredResponse
    used_s: float


@dataclass(slots=True)
class _Share:
    """The entries of one tenant, least recently used first, and their bytes."""

    ids: OrderedDict[str, None] = field(default_factory=OrderedDict)
    size: int = 0


class ResponseStore:
    """Entries of tenants, who cannot access each other's.

    Reading an entry counts as use. When a limit is exceeded, least recently used entries are
    evicted: those of the tenant over `tenant_bytes`, otherwise those of the tenant with the most
    bytes. `clock` returns seconds.
    """

    def __init__(self, limits: StoreLimits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first
        self._shares: dict[str, _Share] = {}
        self._deleted: dict[tuple[str, str], float] = {}  # times by tenant and id, oldest first
        self.size = 0  # bytes of all entries

    def put(self, tenant: str, stored: StoredResponse, *, age_s: float = 0.0) -> bool:
        """Store an entry; False if it is larger than a tenant's share, or was deleted recently: a
        copy of it may be late.

        `age_s`: the age of a copied entry. Copies must be stored before other entries, oldest
        first, except recent ones, which may then expire late by their age.
        """
        self.expire()
        if stored.size > self._limits.tenant_bytes or stored.id in self._entries:
            return False
        if (tenant, stored.id) in self._deleted:
            return False
        self._entries[stored.id] = _Entry(tenant, stored, self._clock() - age_s)
        self._shares.setdefault(tenant, _Share()).ids[stored.id] = None
        self._count(tenant, stored.size)
        self._evict(tenant)
        return stored.id in self._entries

    def delete(self, tenant: str, id: str) -> bool:
        """Delete an entry; False if there is none."""
        self.expire()
        found = self._find(tenant, id) is not None
        if found:
            self._remove(id)
            self._deleted[tenant, id] = self._clock()
        return found

    def merge(self, deleted: Sequence[tuple[str, str]], copies: Sequence[ReplicatedEntry]) -> None:
        """Executes changes that another process has executed: what was deleted, by tenant and id,
        and what was stored."""
        for tenant, id in deleted:
            self.delete(tenant, id)
        for each in copies:
            self.put(each.tenant, each.stored, age_s=each.age_s)

    def select(self, tenant: str, ids: Sequence[str], max_bytes: int) -> Selection:
        """The entries of these ids."""
        self.expire()
        found = [self._find(tenant, id) for id in ids]
        missing = next((id for id, each in zip(ids, found, strict=True) if each is None), None)
        return self._selection(tenant, [each for each in found if each], missing, max_bytes)

    def conversation(self, tenant: str, id: str, max_bytes: int) -> Selection:
        """The entry and those that it continues, oldest first."""
        self.expire()
        found: list[StoredResponse] = []
        following: str | None = id
        while following is not None:
            stored = self._find(tenant, following)
            if stored is None:
                break
            found.append(stored)
            following = stored.previous
        return self._selection(tenant, found[::-1], following, max_bytes)

    def expire(self) -> None:
        """Removes entries that have not been used for `max_age_s`, and old deletions."""
        oldest_s = self._clock() - self._limits.max_age_s
        while self._entries and next(iter(self._entries.values())).used_s < oldest_s:
            self._remove(next(iter(self._entries)))
        recent_s = self._clock() - RECENT_S
        while self._deleted and next(iter(self._deleted.values())) < recent_s:
            del self._deleted[next(iter(self._deleted))]

    def recently_deleted(self) -> list[tuple[str, str]]:
        """Tenants and ids of the entries that were deleted within `RECENT_S`."""
        return list(self._deleted)

    def recent_ids(self) -> list[str]:
        """The ids of the entries that were stored or used within `RECENT_S`, in the order of
        `ids`."""
        recent_s = self._clock() - RECENT_S
        newest_first = reversed(self._entries.values())
        recent = takewhile(lambda entry: entry.used_s >= recent_s, newest_first)
        return [entry.stored.id for entry in recent][::-1]

    def ids(self) -> list[str]:
        """The ids of all entries, least recently used first."""
        return list(self._entries)

    def copies(self, ids: Sequence[str], max_bytes: int) -> list[ReplicatedEntry]:
        """The stored entries with these ids, in this order, up to `max_bytes` in total, but at
        least one."""
        copies: list[ReplicatedEntry] = []
        size, now = 0, self._clock()
        for entry in filter(None, map(self._entries.get, ids)):
            size += entry.stored.size
            if copies and size > max_bytes:
                break
            copies.append(ReplicatedEntry(entry.tenant, entry.stored, now - entry.used_s))
        return copies

    def _find(self, tenant: str, id: str) -> StoredResponse | None:
        entry = self._entries.get(id)
        return None if entry is None or entry.tenant != tenant else entry.stored

    def _selection(
        self, tenant: str, found: Sequence[StoredResponse], missing: str | None, max_bytes: int
    ) -> Selection:
        for each in found:
            self._entries[each.id].used_s = self._clock()
            self._entries.move_to_end(each.id)
            self._shares[tenant].ids.move_to_end(each.id)
        size = sum(each.size - ENTRY_BYTES for each in found)
        return Selection(tuple(found) if size <= max_bytes else (), size, missing)

    def _evict(self, tenant: str) -> None:
        share = self._shares[tenant]
        while share.size > self._limits.tenant_bytes:
            self._remove(next(iter(share.ids)))
        while self.size > self._limits.max_bytes:
            largest = max(self._shares.values(), key=lambda each: each.size)
            self._remove(next(iter(largest.ids)))

    def _remove(self, id: str) -> None:
        entry = self._entries.pop(id)
        share = self._shares[entry.tenant]
        del share.ids[id]
        self._count(entry.tenant, -entry.stored.size)
        if not share.ids:
            del self._shares[entry.tenant]

    def _count(self, tenant: str, size: int) -> None:
        self.size += size
        self._shares[tenant].size += size
