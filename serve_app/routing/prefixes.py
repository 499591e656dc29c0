"""What prompts begin with, told without tokens: chains of digests, and who holds which prefix."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

BYTES_PER_TOKEN = 4
FIRST_BYTES = 128
# From where on a block is an eighth of all before it: even a long prompt has few dozen blocks, and
# what is known of a prefix is at most so much shorter than the prefix.
GROWING_FROM = 1024
MOST_BYTES = 2**30
MOST_ENTRIES = 400_000  # of some 330 bytes each


def _boundaries() -> Iterator[int]:
    end = FIRST_BYTES
    while end < MOST_BYTES:
        yield end
        end += FIRST_BYTES if end < GROWING_FROM else end // 8


BOUNDARIES = tuple(_boundaries())


@dataclass(frozen=True, slots=True)
class PrefixHashes:
    """A prompt's beginnings, the shortest first: each one's key and its length in tokens.

    Two prompts have a key in common where they are the same up to there, and only there.
    `tokens`: about how long the whole prompt is.
    """

    keys: tuple[int, ...]
    ends: tuple[int, ...]
    tokens: int


def chain_of(content: bytes) -> PrefixHashes:
    """The chain of a prompt whose text, and whatever else decides its tokens, is `content`."""
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
    """Which replica holds which prefix, as far as one has heard; bounded, the oldest goes first.

    Replicas forget too: what a replica has not used while it computed as many tokens as its cache
    holds counts as gone. `at_most`: entries, of one replica with one key each.
    """

    def __init__(self, *, at_most: int = MOST_ENTRIES) -> None:
        self._at_most = at_most
        self._entries = 0
        # For each key, the longest unused first: its holders with their clocks when they used it.
        self._holders: OrderedDict[int, dict[str, int]] = OrderedDict()
        self._clocks: dict[str, int] = {}  # tokens that a replica has computed
        self._oldest: dict[str, int] = {}  # what it used before this is gone

    def __len__(self) -> int:
        return self._entries

    def set_clock(self, replica: str, *, computed_tokens: int, cache_tokens: int) -> None:
        """What is known of a replica's cache; one that nothing is known of holds nothing."""
        self._clocks[replica] = computed_tokens
        self._oldest[replica] = computed_tokens - cache_tokens

    def note(self, replica: str, chain: PrefixHashes) -> None:
        """The replica has been given a prompt, so it holds it from now on."""
        clock = self._clocks.get(replica)
        if clock is None:
            return
        # The shortest prefix last: it is the one to be kept the longest.
        for key in reversed(chain.keys):
            holders = self._holders.setdefault(key, {})
            self._entries += replica not in holders
            holders.pop(replica, None)  # so that the latest stands last
            holders[replica] = clock
            self._holders.move_to_end(key)
        while self._entries > self._at_most:
            _, holders = self._holders.popitem(last=False)
            self._entries -= len(holders)

    def forget(self, replica: str) -> None:
        """The replica is gone; what was known of it goes when it is looked at, or is the oldest."""
        self._clocks.pop(replica, None)
        self._oldest.pop(replica, None)

    def holders(self, chain: PrefixHashes, *, at_most: int) -> list[str]:
        """Who holds the longest known prefix, the latest first."""
        for key in reversed(chain.keys):
            holders = self._holders.get(key)
            if holders:
                found = self._living(key, holders, at_most)
                if found:
                    return found
        return []

    def held_tokens(self, replica: str, chain: PrefixHashes) -> int:
        """How much of the prompt the replica holds.

        Whoever uses a prefix uses all shorter ones, so they are held at least as long.
        """
        oldest = self._oldest.get(replica)
        if oldest is None:
            return 0
        keys, held, missing = chain.keys, 0, len(chain.keys)
        while held < missing:
            middle = (held + missing) // 2
            holders = self._holders.get(keys[middle])
            if holders is not None and holders.get(replica, oldest) > oldest:
                held = middle + 1
            else:
                missing = middle
        return chain.ends[held - 1] if held else 0

    def _living(self, key: int, holders: dict[str, int], at_most: int) -> list[str]:
        """The latest holders that still hold it; those found gone on the way are dropped."""
        found: list[str] = []
        gone: list[str] = []
        for replica, used in reversed(holders.items()):
            if replica in self._oldest and used > self._oldest[replica]:
                found.append(replica)
            else:
                gone.append(replica)
            if len(found) == at_most:
                break
        for replica in gone:
            del holders[replica]
        self._entries -= len(gone)
        if not holders:
            del self._holders[key]
        return found
