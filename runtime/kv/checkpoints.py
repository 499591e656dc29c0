"""Checkpoints of recurrent states: at which positions they are taken, and which are kept.

A checkpoint is a page with a copy of a sequence's state after a multiple of the page size. It makes
the cached pages of attention before that position usable as a prefix.
"""

from dataclasses import dataclass, field

from runtime.kv.page_group import PageGroup, PageKey, PageOwner


@dataclass(frozen=True, slots=True)
class CheckpointRules:
    """Where checkpoints are taken, in tokens; positions are rounded down to pages.

    In a prompt: `margin` before its end, because the next turn repeats the prompt except for the
    last tokens, with which a template opens the answer; every `sparse` tokens; and where an earlier
    prompt with the same beginning diverged. Each must save at least `least` tokens, because it
    costs a step. In an answer: every `spacing` tokens, without further steps; only the latest is
    kept.
    """

    margin: int = 8
    least: int = 64
    sparse: int = 2048
    spacing: int = 64

    def in_prompt(
        self, length: int, *, begin: int, shared: int, page_tokens: int, most: int
    ) -> list[int]:
        """Positions in a prompt, in order. `begin`: length of the restored prefix. `shared`: length
        of the longest prefix whose pages are cached. At most a quarter of the `most` checkpoints
        are `sparse` ones."""
        sparse = max(self.sparse, -(-4 * length // max(most, 1)))
        sparse = max(1, sparse // page_tokens) * page_tokens
        end = max(0, length - self.margin) // page_tokens * page_tokens
        spaced = (p for p in range(sparse, end, sparse) if begin + self.least <= p)
        chosen = set(spaced)
        # The end of a sequence that has grown since its last checkpoint is not a divergence.
        if shared > begin + max(self.least, self.spacing):
            chosen.add(shared)
        if end >= begin + self.least:
            chosen.add(end)
        return sorted(chosen)

    def in_answer(self, position: int, *, page_tokens: int) -> bool:
        return position % (-(-self.spacing // page_tokens) * page_tokens) == 0


@dataclass(slots=True)
class _Record:
    """The checkpoints of one sequence: positions `planned` at admission, those `taken` but not yet
    confirmed, and the latest one in its answer. `counted`: positions before it are in the total of
    computed tokens, or were not computed."""

    known: int
    planned: list[int]
    counted: int
    restored: int | None = None  # the checkpoint's page that it starts from, until it is copied
    taken: list[tuple[int, int]] = field(default_factory=list)  # positions and pages
    latest: PageKey | None = None


class StateCheckpoints:
    """Checkpoints in pages of `group`, which has one page per running sequence and more.

    A page that is neither free nor a sequence's state is a checkpoint, published under the key of
    the prefix's last page; the least recently used one is evicted first. It is also dropped when
    that attention page is evicted; pages at the end of a prefix are evicted first, so a checkpoint
    does not outlive its prefix for long. No checkpoint is taken if no page is available.
    """

    def __init__(
        self, group: PageGroup, *, page_tokens: int, rules: CheckpointRules | None = None
    ) -> None:
        self._group, self._page_tokens = group, page_tokens
        self._rules = rules or CheckpointRules()
        self._records: dict[PageOwner, _Record] = {}
        self.taken = self.hits = 0  # in total
        self._kept = self._computed = 0  # in total: checkpoints that replaced none, and tokens

    @property
    def held(self) -> int:
        return len(self._group.by_key)

    def lifetime_tokens(self, pages: int) -> int | None:
        """The number of tokens that are computed while sequences leave `pages` checkpoints, after
        which the older ones are evicted; at the rate so far, None without any."""
        return pages * self._computed // self._kept if self._kept else None

    def usable(self, key: PageKey) -> bool:
        """Whether there is a checkpoint with this key, and another page for the sequence's
        state."""
        page = self._group.by_key.get(key)
        return page is not None and self._group.available > (self._group.owners[page] == 0)

    def admit(self, owner: PageOwner, *, begin: int, shared: int) -> None:
        """Plan the checkpoints of a sequence that starts from the one at `begin`, 0 for none."""
        most = len(self._group.owners) // 2
        positions = self._rules.in_prompt(
            len(owner.tokens), begin=begin, shared=shared, page_tokens=self._page_tokens, most=most
        )
        planned = [position for position in positions if owner.may_end_at(position)]
        record = self._records[owner] = _Record(len(owner.tokens), planned, begin)
        if begin:
            record.restored = self._group.by_key[owner.page_keys[begin // self._page_tokens - 1]]
            self._group.share(record.restored)

    def restore(self, owner: PageOwner) -> int | None:
        """The checkpoint page to copy into the owner's state page; None if it has no checkpoint.
        Returned once."""
        record = self._records.get(owner)
        if record is None or record.restored is None:
            return None
        page, record.restored = record.restored, None
        self._group.drop(page)
        self.hits += 1
        return page

    def chunk_end(self, owner: PageOwner, start: int, end: int) -> int:
        """`end`, or the first earlier position after `start` where a checkpoint is planned."""
        record = self._records.get(owner)
        between = (p for p in record.planned if start < p < end) if record is not None else ()
        return next(iter(between), end)

    def take(self, owner: PageOwner, position: int) -> int | None:
        """A page for a copy of the owner's state before `position`, if one is due there."""
        record, group = self._records.get(owner), self._group
        if record is None or not group.available or not self._due(record, position):
            return None
        page = group.take()
        record.taken.append((position, page))
        self.taken += 1
        return page

    def unpublished(self, owner: PageOwner) -> bool:
        """Whether `publish` would publish a checkpoint."""
        record = self._records.get(owner)
        return record is not None and any(p <= owner.confirmed for p, _ in record.taken)

    def publish(self, owner: PageOwner) -> None:
        """Make the owner's confirmed checkpoints available to others."""
        record, group, held = self._records[owner], self._group, self.held
        while record.taken and record.taken[0][0] <= owner.confirmed:
            position, page = record.taken.pop(0)
            key = owner.page_keys[position // self._page_tokens - 1]
            group.publish(page, key)
            group.drop(page)
            if position > record.known:
                if record.latest is not None:
                    group.forget(record.latest)
                record.latest = key
        self._kept += self.held - held
        self._count(owner, record)

    def _count(self, owner: PageOwner, record: _Record) -> None:
        self._computed += owner.confirmed - record.counted
        record.counted = owner.confirmed

    def release(self, owner: PageOwner) -> None:
        record = self._records.pop(owner, None)
        if record is None:
            return
        self._count(owner, record)
        for page in (page for _, page in record.taken):
            self._group.drop(page)
        if record.restored is not None:
            self._group.drop(record.restored)

    def check_idle(self) -> None:
        assert not self._records, "a sequence has checkpoints that are not confirmed"

    def _due(self, record: _Record, position: int) -> bool:
        if position in record.planned:
            return True
        answer = position > record.known
        return answer and self._rules.in_answer(position, page_tokens=self._page_tokens)
