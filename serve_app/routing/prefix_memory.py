"""Hashes of prompt prefixes, and a bounded record of which replica holds which prefix."""

from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b

from serve_app.messages.replica_load import PrefixHashes

BYTES_PER_TOKEN = 4
FIRST_BYTES = 128
# Beyond this length, each block is an eighth of the content before it. So long prompts have only a
# few dozen blocks, and the known length of a shared prefix is at most an eighth too short.
GROWING_FROM = 1024
MAX_BYTES = 2**30
MAX_ENTRIES = 400_000  # entries take about 330 bytes each, 132 MB together


def _boundaries() -> Iterator[int]:
    end = FIRST_BYTES
    while end < MAX_BYTES:
        yield end
        end += FIRST_BYTES if end < GROWING_FROM else end // 8


BOUNDARIES = tuple(_boundaries())


def hash_prefixes(content: bytes) -> PrefixHashes:
    """`content`: everything that determines the prompt's tokens, in the order of the prompt."""
    view = memoryview(content)
    digest = blake2b(digest_size=8)
    keys: list[int] = []
    begin = 0
    for end in BOUNDARIES:
        if end > len(content):
            break
        digest.update(view[begin:end])
        keys.append(int.from_bytes(digest.digest()))
        begin = end
    ends = tuple(end // BYTES_PER_TOKEN for end in BOUNDARIES[: len(keys)])
    return PrefixHashes(tuple(keys), ends, -(-len(content) // BYTES_PER_TOKEN))


class PrefixMemory:
    """Records which replica holds which prefix; least recently used entries are evicted first.

    The replicas' caches evict too: a prefix counts as evicted if the replica has since computed as
    many tokens as its cache holds without using it. `max_entries`: maximum number of pairs of a
    prefix and a replica.
    """

    def __init__(self, *, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._entries = 0
        # For each prefix, least recently used first: the replicas that hold it, with the clock of
        # the replica at its last use. A replica's clock counts the tokens that it has computed.
        self._holders: OrderedDict[int, dict[str, int]] = OrderedDict()
        self._clocks: dict[str, int] = {}
        self._evicted_until: dict[str, int] = {}  # prefixes last used before this are evicted

    def set_clock(self, replica: str, *, computed_tokens: int, cache_tokens: int) -> None:
        """Updates a replica's clock and cache size; unknown replicas hold nothing."""
        self._clocks[replica] = computed_tokens
        self._evicted_until[replica] = computed_tokens - cache_tokens

    def record(self, replica: str, hashes: PrefixHashes) -> None:
        """Records that a prompt was sent to the replica, which then holds its prefixes."""
        clock = self._clocks.get(replica)
        if clock is None:
            return
        # The shortest prefix comes last, so it is evicted last.
        for key in reversed(hashes.keys):
            holders = self._holders.setdefault(key, {})
            self._entries += replica not in holders
            holders.pop(replica, None)  # so that the latest holder is the last entry
            holders[replica] = clock
            self._holders.move_to_end(key)
        while self._entries > self._max_entries:
            _, holders = self._holders.popitem(last=False)
            self._entries -= len(holders)

    def retract(self, replica: str, hashes: PrefixHashes, *, held_tokens: int) -> None:
        """Undoes `record` for a prompt that the replica has not computed after all. `held_tokens`:
        what it held before."""
        for key, end in zip(hashes.keys, hashes.ends, strict=True):
            holders = self._holders.get(key, {})
            if end > held_tokens and holders.pop(replica, None) is not None:
                self._entries -= 1
                if not holders:
                    del self._holders[key]

    def remove(self, replica: str) -> None:
        """Removes a replica. Its entries are dropped when they are looked up or evicted."""
        self._clocks.pop(replica, None)
        self._evicted_until.pop(replica, None)

    def holders(self, hashes: PrefixHashes, *, limit: int) -> list[str]:
        """Replicas that hold the longest known prefix of the prompt, latest first."""
        for key in reversed(hashes.keys):
            holders = self._holders.get(key)
            if holders:
                found = self._current_holders(key, holders, limit)
                if found:
                    return found
        return []

    def held_tokens(self, replica: str, hashes: PrefixHashes) -> int:
        """Number of the prompt's tokens that the replica holds.

        Use of a prefix is use of all shorter ones, so a binary search finds the longest held one.
        """
        evicted_until = self._evicted_until.get(replica)
        if evicted_until is None:
            return 0
        keys, held, missing = hashes.keys, 0, len(hashes.keys)
        while held < missing:
            middle = (held + missing) // 2
            holders = self._holders.get(keys[middle])
            if holders is not None and holders.get(replica, evicted_until) > evicted_until:
                held = middle + 1
            else:
                missing = middle
        return hashes.ends[held - 1] if held else 0

    def _current_holders(self, key: int, holders: dict[str, int], limit: int) -> list[str]:
        """The latest replicas that still hold the prefix; entries found evicted are dropped."""
        found: list[str] = []
        evicted: list[str] = []
        for replica, used in reversed(holders.items()):
            if replica in self._evicted_until and used > self._evicted_until[replica]:
                found.append(replica)
            else:
                evicted.append(replica)
            if len(found) == limit:
                break
        for replica in evicted:
            del holders[replica]
        self._entries -= len(evicted)
        if not holders:
            del self._holders[key]
        return found
