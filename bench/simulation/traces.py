"""Traces of requests: conversations, questions about documents, and unrelated prompts."""

import uuid
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random

from serve_app.messages.replica_load import PrefixHashes
from serve_app.routing.prefix_memory import BOUNDARIES, BYTES_PER_TOKEN

ENDS = tuple(end // BYTES_PER_TOKEN for end in BOUNDARIES)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt. `parts`: (stream, begin, end) of each part that other prompts may share, in order.

    `affinity`: the hash key of the conversation or document, for consistent hashing.
    """

    hashes: PrefixHashes
    parts: tuple[tuple[int, int, int], ...]
    answer: int
    affinity: int
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def tokens(self) -> int:
        return self.hashes.tokens


@dataclass(frozen=True, slots=True)
class Turn:
    """A question of a session. `pause_s`: the time from the previous answer to this question."""

    question: int
    answer: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class Session:
    """Consecutive turns. Questions about a document share the document, but have no history.

    `shared`: the stream that the session's prompts begin with, and its length in tokens.
    """

    at_s: float
    own: int
    shared: tuple[int, int] | None
    turns: tuple[Turn, ...]
    converses: bool

    def requests(self) -> Iterator[tuple[float, Request]]:
        """Each turn's request, with the pause before it."""
        begin = self.shared[1] if self.shared else 0
        affinity = self.own if self.converses or not self.shared else self.shared[0]
        length = begin
        for number, turn in enumerate(self.turns):
            own = self.own if self.converses else (self.own << 8) + number
            length = (length if self.converses else begin) + turn.question
            parts: tuple[tuple[int, int, int], ...] = ((own, begin, length),)
            if self.shared:
                parts = ((*self.shared[:1], 0, begin), *parts)
            hashes = _hashes(self.shared, own, length)
            yield turn.pause_s, Request(hashes, parts, turn.answer, affinity)
            length += turn.answer


def _hashes(shared: tuple[int, int] | None, own: int, length: int) -> PrefixHashes:
    count = bisect_right(ENDS, length)
    common = bisect_right(ENDS, min(shared[1], length)) if shared else 0
    keys = [hash((shared[0], index)) for index in range(common)] if shared else []
    keys += [hash((own, index)) for index in range(common, count)]
    return PrefixHashes(tuple(keys), ENDS[:count], length)


@dataclass(frozen=True, slots=True)
class Mix:
    """The rate of sessions and the weight of each kind."""

    sessions_per_s: float
    chats: float = 0.0
    documents: float = 0.0
    unshared: float = 0.0
    think_s: float = 20.0
    systems: int = 40
    libraries: int = 200  # documents with repeated questions
    longest: int = 12_000
    prompt: int = 500  # median length of unrelated prompts, in tokens
    answer: int = 120  # median length
    burst_every_s: float | None = None
    burst_s: float = 10.0
    burst_times: float = 3.0


def sessions(mix: Mix, *, seconds: float, seed: int) -> list[Session]:
    """A Poisson process of sessions with a higher rate during bursts."""
    random = Random(seed)
    kinds = ("chat", "document", "unshared")
    weights = (mix.chats, mix.documents, mix.unshared)
    maker = _Maker(mix, random)
    found, now = list[Session](), 0.0
    while True:
        now += random.expovariate(mix.sessions_per_s * _intensity(mix, now))
        if now > seconds:
            return found
        (kind,) = random.choices(kinds, weights)
        found.append(maker.make(kind, now))


def _intensity(mix: Mix, now: float) -> float:
    if mix.burst_every_s is None:
        return 1.0
    return mix.burst_times if now % mix.burst_every_s > mix.burst_every_s - mix.burst_s else 1.0


class _Maker:
    def __init__(self, mix: Mix, random: Random) -> None:
        self._mix = mix
        self._random = random
        self._streams = 1
        # Zipf popularity: the n-th has a weight of 1/n.
        self._systems = self._library(mix.systems, 600, 0.9, 4_000)
        self._documents = self._library(mix.libraries, mix.longest / 3, 0.7, mix.longest)

    def make(self, kind: str, now: float) -> Session:
        own = self._stream()
        if kind == "chat":
            count = min(12, 1 + int(self._random.expovariate(1 / 4)))
            turns = tuple(self._turn(60, 0.9, first=n == 0) for n in range(count))
            return Session(now, own, self._one_of(self._systems), turns, True)
        if kind == "document":
            turns = (self._turn(40, 0.6, first=True),)
            return Session(now, own, self._one_of(self._documents), turns, False)
        return Session(now, own, None, (self._turn(self._mix.prompt, 1.0, first=True),), True)

    def _turn(self, median: float, spread: float, *, first: bool) -> Turn:
        random = self._random
        pause_s = 0.0 if first else random.expovariate(1 / self._mix.think_s)
        answer = self._length(self._mix.answer, 0.8, 1_000)
        return Turn(self._length(median, spread, 8_000), answer, pause_s)

    def _length(self, median: float, spread: float, at_most: int) -> int:
        return min(at_most, max(2, int(median * self._random.lognormvariate(0.0, spread))))

    def _library(
        self, count: int, median: float, spread: float, at_most: int
    ) -> tuple[list[tuple[int, int]], list[float]]:
        found = [(self._stream(), self._length(median, spread, at_most)) for _ in range(count)]
        return found, list(accumulate(1 / rank for rank in range(1, count + 1)))

    def _one_of(self, library: tuple[list[tuple[int, int]], list[float]]) -> tuple[int, int]:
        return self._random.choices(library[0], cum_weights=library[1])[0]

    def _stream(self) -> int:
        self._streams += 1
        return self._streams
