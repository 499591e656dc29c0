"""Pages of KV cache: their owners, sharing, and the prefix cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from runtime.engine.context_shift import ContextCut
from runtime.kv.cache_kinds import CacheKind, images_within
from runtime.kv.checkpoints import CheckpointRules, StateCheckpoints
from runtime.kv.host_store import HostPages, HostStore
from runtime.kv.page_demand import has_room, missing
from runtime.kv.page_group import HeldPages, PageCopy, PageGroup, PageKey, PageOwner
from runtime.kv.page_shift import MovedPages, can_move, move_pages
from runtime.kv.page_shortage import PageShortage


@dataclass(frozen=True, slots=True)
class PageGrant:
    """`page` of `group` now holds index `index` of the owner."""

    group: int
    index: int
    page: int


class KVCacheManager:
    """Reserves, shares, publishes, trims and releases pages; knows nothing of tensors.

    Pages hold a group's indices: positions, or image rows (`CacheKind`). Groups with one
    state per sequence share page numbers. In models with such groups, a prefix is usable only where
    a checkpoint of its states is cached too (runtime/kv/checkpoints.py).

    Pages are reused as soon as their owner releases them: device state changes only by launched
    plans, in order, so a later plan cannot overtake one that still reads the page. `take_copies`
    returns the page copies that the next plan must make. With `host_pages`, evicted pages go to a
    store in host memory, from which prefixes are restored. `moves_keys`: steps can shift keys to
    other positions. `shortage`: for callers whose `reserve` has failed.
    """

    def __init__(
        self,
        kinds: Sequence[CacheKind],
        pages: Sequence[int],
        *,
        page_tokens: int,
        prefix_cache: bool = True,
        checkpoint_rules: CheckpointRules | None = None,
        host_pages: HostPages | None = None,
        moves_keys: bool = False,
    ) -> None:
        self._kinds, self._moves_keys = tuple(kinds), moves_keys
        declared = list(zip(kinds, pages, strict=True))
        self._paged = [
            PageGroup(kind, count, (number,))
            for number, (kind, count) in enumerate(declared)
            if not kind.by_sequence
        ]
        self._states = _states_group(declared)
        self._groups = [*self._paged, *([self._states] if self._states else [])]
        self.shortage = PageShortage(self._groups)
        self._shrinking = [group for group in self._groups if group.shrinks]
        self._page_tokens = page_tokens
        self._prefix_cache = prefix_cache
        self.checkpoints: StateCheckpoints | None = None
        if self._states is not None and prefix_cache:
            self.checkpoints = StateCheckpoints(
                self._states, page_tokens=page_tokens, rules=checkpoint_rules
            )
        self._copies: list[PageCopy] = []
        self.host_store: HostStore | None = None
        if host_pages is not None and any(host_pages.counts) and prefix_cache:
            self.host_store = HostStore(
                self._groups, host_pages, self._copies, page_tokens=page_tokens
            )
        for group in self._groups:
            group.evicted = self._evicted
        # Of owners without images: positions for which all groups have pages, and the number of
        # confirmed positions that completes the next page.
        self._reserved: dict[PageOwner, int] = {}
        self._completes: dict[PageOwner, int] = {}

    @property
    def page_tokens(self) -> int:
        return self._page_tokens

    @property
    def pages_total(self) -> int:
        return sum(len(group.owners) for group in self._groups)

    @property
    def cacheable_tokens(self) -> int:
        """Capacity of the prefix cache in tokens, host memory included; 0 without prefix cache.
        With states, at most the tokens that are computed until a checkpoint is evicted."""
        if not self._prefix_cache:
            return 0
        store = self.host_store
        capacities = (
            len(group.owners) + (store.capacity(group) if store is not None else 0)
            for group in self._paged
        )
        tokens = max(capacities, default=0) * self._page_tokens
        if self._states is None or self.checkpoints is None:
            return tokens
        places = self._states.available + (store.capacity(self._states) if store else 0)
        lifetime = self.checkpoints.lifetime_tokens(places)
        return tokens if lifetime is None else min(tokens, lifetime)

    @property
    def pages_owned(self) -> int:
        """Pages with an owner; idle cached pages do not count."""
        return self.pages_total - sum(group.available for group in self._groups)

    @property
    def occupancy(self) -> float:
        """The share of owned pages in the fullest group, 0 to 1."""
        shares = (1 - group.available / len(group.owners) for group in self._groups if group.owners)
        return max(shares, default=0.0)

    def images_needed(self, owner: PageOwner, begin: int, end: int) -> tuple[bytes, ...]:
        """The images whose features the positions [begin, end) need, in the order of use."""
        if not owner.spans or begin >= owner.spans[-1].end:
            return ()
        inserted = (span.digest for span in images_within(owner.inserted, begin, end))
        filled = (group.kind.filled_images(begin, end, owner.spans) for group in self._groups)
        cross = (place.image.digest for places in filled for place in places)
        return tuple(dict.fromkeys((*inserted, *cross)))

    def image_rows(self, owner: PageOwner, begin: int, end: int) -> int:
        """The number of image rows that a step with the positions [begin, end) fills."""
        filled = (group.kind.filled_images(begin, end, owner.spans) for group in self._groups)
        rows = (sum(len(p.rows) + len(p.padding) for p in places) for places in filled)
        return max(rows, default=0)

    def reserve(self, owner: PageOwner, end: int) -> list[PageGrant] | None:
        """Reserve pages for positions up to `end`; the new pages, or None and no change."""
        if end <= self._reserved.get(owner, 0):
            return []
        wanted = [missing(group, owner, end, self._page_tokens) for group in self._groups]
        if any(len(w) > g.available for w, g in zip(wanted, self._groups, strict=True)):
            return None
        grants = []
        for indices, group in zip(wanted, self._groups, strict=True):
            if not indices:
                continue
            held = group.held.setdefault(owner, HeldPages())
            if not held.pages:
                held.begin = indices.start
            for index in indices:
                page = group.take()
                held.pages.append(page)
                grants += [PageGrant(number, index, page) for number in group.numbers]
        self._copy_checkpoint(owner)
        if not owner.spans:
            self._reserved[owner] = -(-end // self._page_tokens) * self._page_tokens
        return grants

    def has_room(self, owner: PageOwner, end: int, *, in_flight: int) -> bool:
        """Whether all pages are available that the owner needs at once until it has computed the
        positions up to `end`, at most `in_flight` of them in a step, beside those that windows of
        the other owners need at once."""
        size = self._page_tokens
        return all(has_room(group, owner, end, in_flight, size) for group in self._groups)

    def adopt(self, owner: PageOwner) -> tuple[int, list[PageGrant]]:
        """Share the longest cached prefix with a sequence that has no pages. Returns its length and
        its pages.

        It excludes at least the last token, because a step must compute the next token's logits.
        """
        found, shared = self._longest(owner)
        if self.host_store is not None and found is not None:
            self.host_store.restore(self._needed_keys(owner, found))
        length = 0 if found is None else found.length
        if self.checkpoints is not None:
            self.checkpoints.admit(owner, begin=length, shared=shared)
        return (0, []) if found is None else (length, self._share(owner, found))

    def cached_prefix(self, owner: PageOwner) -> int:
        """The number of tokens that `adopt` would share now."""
        found, _ = self._longest(owner)
        return 0 if found is None else found.length

    def chunk_end(self, owner: PageOwner, start: int, end: int) -> int:
        """`end`, or the first earlier position after `start` where a checkpoint is planned."""
        return end if self.checkpoints is None else self.checkpoints.chunk_end(owner, start, end)

    def checkpoint(self, owner: PageOwner, start: int) -> None:
        """Take a checkpoint of the owner's state before `start`, where the next step begins, if one
        is planned there."""
        page = None if self.checkpoints is None else self.checkpoints.take(owner, start)
        if page is not None:
            self._copy_state(self._state_page(owner), page)

    def take_copies(self) -> tuple[PageCopy, ...]:
        """The copies that the next plan must make first, in order. They are returned once."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def note_prefill_speed(self, tokens_per_s: float | None) -> None:
        """Set the measured speed of prefill, which decides whether host copies pay off."""
        if self.host_store is not None:
            self.host_store.tokens_per_s = tokens_per_s

    def _copy_checkpoint(self, owner: PageOwner) -> None:
        """Copy the checkpoint that the owner starts from to its own page, once it has one."""
        page = None if self.checkpoints is None else self.checkpoints.restore(owner)
        if page is not None:
            self._copy_state(page, self._state_page(owner))

    def _copy_state(self, source: int, target: int) -> None:
        assert self._states is not None
        self._copies += [PageCopy(number, source, target) for number in self._states.numbers]

    def _state_page(self, owner: PageOwner) -> int:
        assert self._states is not None
        (page,) = self._states.held[owner].pages
        return page

    def _evicted(self, group: PageGroup, page: int, key: PageKey) -> None:
        store = self.host_store
        if store is not None:
            store.store(group, page, key)
        if self._states is not None and (store is None or not store.has(group, key)):
            self._states.forget(key)  # a checkpoint that is useless without the page

    def _longest(self, owner: PageOwner) -> "tuple[_Prefix | None, int]":
        """The longest prefix that `adopt` would share, using host pages if that pays off. Also the
        length of the longest prefix whose pages are on the device, with or without a checkpoint."""
        if not self._prefix_cache:
            return None, 0
        (found, shared), store = self._search(owner), self.host_store
        if store is None or not store.held:
            return found, shared
        wider, _ = self._search(owner, host=store)
        more = 0 if wider is None else wider.length - (found.length if found is not None else 0)
        if (
            wider is not None
            and more
            and store.affords(self._needed_keys(owner, wider), tokens=more)
        ):
            found = wider
        return found, shared

    def _search(
        self, owner: PageOwner, *, host: HostStore | None = None
    ) -> "tuple[_Prefix | None, int]":
        """The longest usable prefix on the device, or on the device and in `host` together; and the
        length of the longest prefix if checkpoints are ignored."""
        shared = 0
        size = self._page_tokens
        full = self._whole_run(owner, host)
        keys = [self._group_keys(group, owner, full * size) for group in self._paged]
        runs = [_runs(group, some, host) for group, some in zip(self._paged, keys, strict=True)]
        for length in range(full * size, 0, -size):
            restorable = self._restorable(owner, length, host)
            if not owner.may_end_at(length) or (shared and not restorable):
                continue
            needed = [self._pages_seen(group, owner, length) for group in self._paged]
            if all(run[pages.stop] <= pages.start for run, pages in zip(runs, needed, strict=True)):
                shared = shared or length
                if restorable:
                    return _Prefix(length, needed, keys), shared
        return None, shared

    def _whole_run(self, owner: PageOwner, host: HostStore | None) -> int:
        """The number of full pages that a prefix can have at most: those before the first page that
        is missing in a group whose rows see all earlier positions. Keys are computed up to it."""
        size, most = self._page_tokens, (len(owner.tokens) - 1) // self._page_tokens
        whole = [group for group in self._paged if not group.shrinks]
        if not whole:
            return self._extend_keys(owner, most * size)
        for index in range(most):
            self._extend_keys(owner, (index + 1) * size)
            if not all(_cached(group, owner.page_keys[index], host) for group in whole):
                return index
        return most

    def _restorable(self, owner: PageOwner, length: int, host: HostStore | None) -> bool:
        """Whether a checkpoint of the states after the prefix exists; True without states."""
        if self._states is None or self.checkpoints is None:
            return self._states is None
        key = owner.page_keys[length // self._page_tokens - 1]
        return self.checkpoints.usable(key) or (host is not None and host.has(self._states, key))

    def _needed_keys(
        self, owner: PageOwner, prefix: "_Prefix"
    ) -> list[tuple[PageGroup, list[PageKey]]]:
        """The keys of the pages, and of the states, that the prefix needs on the device."""
        wanted = [
            (group, list(keys[pages.start : pages.stop]))
            for group, pages, keys in zip(self._paged, prefix.pages, prefix.keys, strict=True)
        ]
        if self._states is not None:
            last = prefix.length // self._page_tokens - 1
            wanted.append((self._states, [owner.page_keys[last]]))
        return wanted

    def publish(self, owner: PageOwner) -> None:
        """Add the owner's full, confirmed pages to the prefix cache."""
        if owner.confirmed < self._completes.get(owner, 0) or not self._prefix_cache:
            return
        for group in self._paged:
            held = group.held.get(owner)
            if held is None:
                continue
            full = group.kind.extent(owner.confirmed, owner.spans) // self._page_tokens
            if full <= held.published:
                continue
            self._extend_keys(owner, owner.confirmed)
            for index in range(max(held.published, held.begin), full):
                group.publish(held.pages[index - held.begin], self._key(group, owner, index))
            held.published = full
        if self.checkpoints is None and not owner.spans:
            full = owner.confirmed // self._page_tokens
            self._completes[owner] = (full + 1) * self._page_tokens
        if self.checkpoints is not None and self.checkpoints.unpublished(owner):
            self._extend_keys(owner, owner.confirmed)
            self.checkpoints.publish(owner)

    def trim(self, owner: PageOwner) -> None:
        """Release pages that no later row of the owner can see. Call `publish` before it."""
        for group in self._shrinking:
            held = group.held.get(owner)
            if held is None:
                continue
            first = group.kind.first_visible(owner.confirmed, owner.spans) // self._page_tokens
            if first <= held.begin:
                continue
            gone = min(first - held.begin, len(held.pages))
            for page in held.pages[:gone]:
                group.drop(page)
            del held.pages[:gone]
            held.begin += gone

    def can_shift(self, cut: ContextCut, length: int) -> bool:
        """Whether `shift` can apply `cut` to a sequence without images that has `length` computed
        positions."""
        return self._moves_keys and can_move(
            self._kinds, cut, length, page_tokens=self._page_tokens
        )

    def shift(self, owner: PageOwner, cut: ContextCut) -> MovedPages | None:
        """Drop the positions of `cut` and move the later ones. None, and no change, if there are
        too few pages to copy shared ones. Moved pages differ from those computed from the remaining
        tokens, so the owner must not be passed to `publish` again."""
        moved = move_pages(self._paged, owner, cut, page_tokens=self._page_tokens)
        if moved is not None:
            self._copies += moved.copies
            self._reserved[owner] -= cut.count
        return moved

    def release(self, owner: PageOwner) -> None:
        """Release all pages, the last ones first, so that prefixes stay cached longest."""
        self._reserved.pop(owner, None)
        self._completes.pop(owner, None)
        if self.checkpoints is not None:
            self.checkpoints.release(owner)
        for group in self._groups:
            held = group.held.pop(owner, None)
            if held is not None:
                for page in reversed(held.pages):
                    group.drop(page)

    def check_idle(self) -> None:
        """Assert that no page has an owner and none is lost; for tests."""
        assert not self._reserved, "an ended sequence has reserved pages"
        for group in self._groups:
            group.check_idle()
        if self.checkpoints is not None:
            self.checkpoints.check_idle()
        if self.host_store is not None:
            self.host_store.check()

    def _pages_seen(self, group: PageGroup, owner: PageOwner, length: int) -> range:
        """The full pages within `length` that the row at `length` or a later one can see."""
        first = group.kind.first_visible(length, owner.spans) // self._page_tokens
        return range(first, group.kind.extent(length, owner.spans) // self._page_tokens)

    def _share(self, owner: PageOwner, prefix: "_Prefix") -> list[PageGrant]:
        grants = []
        parts = zip(self._paged, prefix.pages, prefix.keys, strict=True)
        for group, indices, keys in parts:
            pages = [group.by_key[keys[index]] for index in indices]
            for page in pages:
                group.share(page)
            group.held[owner] = HeldPages(indices.start, pages, published=indices.stop)
            found, (number,) = zip(indices, pages, strict=True), group.numbers
            grants += [PageGrant(number, index, page) for index, page in found]
        return grants

    def _group_keys(self, group: PageGroup, owner: PageOwner, length: int) -> list[PageKey]:
        pages = group.kind.extent(length, owner.spans) // self._page_tokens
        if not group.kind.by_image:
            return owner.page_keys[:pages]
        return [self._key(group, owner, index) for index in range(pages)]

    def _key(self, group: PageGroup, owner: PageOwner, index: int) -> PageKey:
        begin = index * self._page_tokens
        content = group.kind.content(begin, begin + self._page_tokens, owner.spans)
        if content is None:
            return owner.page_keys[index]
        return blake2b(content, digest_size=16, key=owner.cache_salt).digest()

    def _extend_keys(self, owner: PageOwner, length: int) -> int:
        """Compute keys for the owner's full pages within `length`; returns their number.

        A key is a hash of the owner's salt and of the whole prefix that ends with the page.
        """
        keys, size = owner.page_keys, self._page_tokens
        for index in range(len(keys), length // size):
            before = keys[-1] if keys else self._lead_in_key(owner)
            content = _content(owner, index * size, (index + 1) * size)
            keys.append(blake2b(before + content, digest_size=16, key=owner.cache_salt).digest())
        return length // size

    def _lead_in_key(self, owner: PageOwner) -> bytes:
        return b";".join(group.kind.lead_in_key(owner.spans) for group in self._groups)


@dataclass(frozen=True, slots=True)
class _Prefix:
    """A cached prefix: the pages of each group that rows after it see, and all page keys."""

    length: int
    pages: Sequence[range]
    keys: Sequence[Sequence[PageKey]]


def _states_group(declared: Sequence[tuple[CacheKind, int]]) -> PageGroup | None:
    """The group for all kinds with one state per sequence."""
    states = [(number, *each) for number, each in enumerate(declared) if each[0].by_sequence]
    if not states:
        return None
    numbers, kinds, counts = zip(*states, strict=True)
    return PageGroup(kinds[0], min(counts), numbers)


def _content(owner: PageOwner, begin: int, end: int) -> bytes:
    """Unambiguous content of the positions: token ids, or an image's digest and row."""
    parts = [b"t%d" % token for token in owner.tokens[begin:end]]
    for span in images_within(owner.spans, begin, end):
        for position in range(max(begin, span.start), min(end, span.end)):
            parts[position - begin] = b"i%s:%d" % (
                span.digest.hex().encode(),
                span.first_row + position - span.start,
            )
    return b",".join(parts)


def _runs(group: PageGroup, keys: Sequence[PageKey], host: HostStore | None) -> list[int]:
    """For each n: the smallest b such that pages b to n - 1 are all cached."""
    begins = [0]
    for index, key in enumerate(keys):
        begins.append(begins[-1] if _cached(group, key, host) else index + 1)
    return begins


def _cached(group: PageGroup, key: PageKey, host: HostStore | None) -> bool:
    return key in group.by_key or (host is not None and host.has(group, key))
