"""Which replica takes the next task: the one that has begun its answer first, as far as is known.

That is the one with the longest known prefix unless it is overloaded, then the one with the least
work queued, in tokens and not in requests. All costs are seconds until the first token: what is
queued, and what the replica has to compute of the task's own prompt. A task that waits may be given
to another later. Plain values and the standard library only, so that `bench/simulate.py` can run it
too.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from serve_app.routing.prefixes import PrefixHashes, PrefixMemory

# For replicas that nothing has been seen of yet, nor of any others.
TOKENS_PER_S = 1000.0
STARTS_PER_S = 1.0
# Of an average, what one more value counts.
NEW = 0.3
# How long answers have to wait for their turn before one counts how often that comes.
COUNTING_S = 0.5
# Tasks of which it is remembered what stood before them; older ones stay where they wait.
MOST_TICKETS = 4096


@dataclass(frozen=True, slots=True)
class Load:
    """Where a replica stands. Totals are since its start; None and 0 where nothing is known.

    `queued_tokens`: of prompts, not yet computed. `slots`: sequences that it works on at once.
    `memory`: the part of the KV cache that they occupy. `tokens_per_s`: what it computes of prompts
    while they queue. `started`: answers that have begun. `computed_tokens`: all that went into its
    cache, which keeps `cache_tokens` for prompts to come.
    """

    queued_tokens: int = 0
    running: int = 0
    waiting: int = 0
    slots: int = 0
    memory: float = 0.0
    tokens_per_s: float | None = None
    started: int = 0
    computed_tokens: int = 0
    cache_tokens: int = 0

    @property
    def full(self) -> bool:
        """Whether those that wait, wait for answers to end and not for their prompts' turn."""
        return self.waiting > 0 and (self.running >= self.slots or self.memory > 0.95)


@dataclass(frozen=True, slots=True)
class Rules:
    """The numbers of the policy. bench/RESULTS.md shows what others give.

    `samples`: replicas that are looked at beside holders of the prefix, of which there are
    `holders` at most. A holder is overloaded where another would begin earlier by `patience_s` and
    by `loyalty` - 1 times what computing the prefix again takes: that time is taken from others.
    `running_tokens`: how much of a queue a sequence at work is worth. `settle_s`: after so long,
    and `settle_token_s` for each of its tokens, a replica's own figures show a task. `silent_s`:
    one that was not heard of for so long is in doubt. `doubt_s`: how long doubts last. `move_s`: a
    task that waits goes elsewhere if it begins so much earlier there, and in half the time.
    """

    samples: int = 4
    holders: int = 4
    patience_s: float = 0.1
    loyalty: float = 3.0
    running_tokens: int = 32
    settle_s: float = 0.1
    settle_token_s: float = 5e-6
    silent_s: float = 5.0
    doubt_s: float = 5.0
    move_s: float = 1.0


@dataclass(slots=True)
class _Mean:
    """A running average."""

    value: float | None = None

    def add(self, value: float, weight: float = NEW) -> None:
        self.value = value if self.value is None else self.value + weight * (value - self.value)


@dataclass(eq=False, slots=True)
class _Ticket:
    """What stood before a task when it was given to the replica: tokens, its `own_tokens` among
    them, and requests that had not begun, itself among them; and how far the replica had got by
    the same report."""

    replica: str
    chain: PrefixHashes
    own_tokens: int
    tokens: int
    requests: int
    computed_tokens: int
    started: int


@dataclass(eq=False, slots=True)
class _Peer:
    """A replica: its last report, and what was given to it since and is not in that report."""

    name: str
    place: int
    load: Load = field(default_factory=Load)
    heard_at: float | None = None
    doubted_until: float = 0.0
    given: deque[tuple[float, int]] = field(default_factory=deque)
    given_tokens: int = 0
    starts_per_s: _Mean = field(default_factory=_Mean)
    counted: tuple[float, int] | None = None  # since when it is full, and `started` then

    def give(self, chain: PrefixHashes, tokens: int, now: float) -> _Ticket:
        """`tokens`: what of the prompt is to be computed."""
        self.given.append((now, tokens))
        self.given_tokens += tokens
        load = self.load
        return _Ticket(
            self.name,
            chain,
            tokens,
            load.queued_tokens + self.given_tokens,
            load.waiting + len(self.given),
            load.computed_tokens,
            load.started,
        )

    def hear(self, load: Load, now: float, rules: Rules) -> None:
        self._count(load, now)
        self.load, self.heard_at, self.doubted_until = load, now, 0.0
        while self.given:
            at, tokens = self.given[0]
            if at + rules.settle_s + rules.settle_token_s * tokens > now:
                return
            self.given.popleft()
            self.given_tokens -= tokens

    def queued_tokens(self, now: float, tokens_per_s: float) -> float:
        """What it reported, less what it has computed since, and what it was given since."""
        age_s = 0.0 if self.heard_at is None else now - self.heard_at
        return max(0.0, self.load.queued_tokens - tokens_per_s * age_s) + self.given_tokens

    @property
    def requests(self) -> int:
        return self.load.running + self.load.waiting + len(self.given)

    @property
    def unplaced(self) -> int:
        """How many answers have to begin or end before one more may begin."""
        load = self.load
        if load.full:
            return self.requests + 1 - load.running
        return max(0, self.requests + 1 - load.slots) if load.slots else 0

    def _count(self, load: Load, now: float) -> None:
        if not load.full:
            self.counted = None
        elif self.counted is None:
            self.counted = now, load.started
        elif now - self.counted[0] >= COUNTING_S and load.started > self.counted[1]:
            since, started = self.counted
            self.starts_per_s.add((load.started - started) / (now - since))
            self.counted = now, load.started


class RoutingPolicy:
    """Chooses among the replicas of one deployment. All times are of one monotonic clock."""

    def __init__(
        self,
        rules: Rules | None = None,
        *,
        memory: PrefixMemory | None = None,
        random: Random | None = None,
    ) -> None:
        self._rules = rules or Rules()
        self._memory = PrefixMemory() if memory is None else memory
        self._random = Random() if random is None else random
        self._peers: dict[str, _Peer] = {}
        self._tickets: OrderedDict[str, _Ticket] = OrderedDict()  # by task, the oldest first
        self._ranks: list[_Peer] = []  # the same, to be drawn from
        self._tokens_per_s = _Mean()
        self._starts_per_s = _Mean()

    @property
    def replicas(self) -> frozenset[str]:
        return frozenset(self._peers)

    def admit(self, replica: str) -> None:
        """A replica is there. Until it reports it counts as idle."""
        assert replica not in self._peers
        self._peers[replica] = peer = _Peer(replica, len(self._ranks))
        self._ranks.append(peer)
        self._memory.set_clock(replica, computed_tokens=0, cache_tokens=1)

    def forget(self, replica: str) -> None:
        """A replica is gone for good."""
        peer = self._peers.pop(replica)
        last = self._ranks.pop()
        if last is not peer:
            self._ranks[peer.place] = last
            last.place = peer.place
        self._memory.forget(replica)

    def report(self, replica: str, load: Load, *, now: float) -> None:
        """A replica's own figures, as of `now`."""
        peer = self._peers.get(replica)
        if peer is None:
            return
        peer.hear(load, now, self._rules)
        if load.tokens_per_s is not None:
            self._tokens_per_s.add(load.tokens_per_s, NEW / len(self._peers))
        if peer.starts_per_s.value is not None:
            self._starts_per_s.add(peer.starts_per_s.value, NEW / len(self._peers))
        self._memory.set_clock(
            replica, computed_tokens=load.computed_tokens, cache_tokens=load.cache_tokens
        )

    def learn(self, replica: str, chain: PrefixHashes) -> None:
        """The replica has been given a prompt, by whomever."""
        self._memory.note(replica, chain)

    def doubt(self, replica: str, *, now: float) -> None:
        """Nothing is heard of the replica any more: others first, until it reports again."""
        peer = self._peers.get(replica)
        if peer is not None:
            peer.doubted_until = now + self._rules.doubt_s

    def choose(
        self,
        chain: PrefixHashes,
        *,
        now: float,
        avoid: frozenset[str] = frozenset(),
        task: str | None = None,
    ) -> str | None:
        """The replica that is given the task; None where there is none.

        One of `avoid`, or one in doubt, only where there is no other. `task`: its name, where
        `better` may be asked for it.
        """
        if not self._peers:
            return None
        return self._give(self._best(chain, now, avoid), chain, now, task)

    def better(self, task: str, *, now: float, avoid: frozenset[str] = frozenset()) -> str | None:
        """The replica that is given a task that waits, because it begins far earlier there than
        where it is: one that was started since, perhaps. None: it is to stay."""
        ticket = self._tickets.get(task)
        peer = None if ticket is None else self._peers.get(ticket.replica)
        if ticket is None or peer is None:
            return None
        stay_s = self._stay_s(peer, ticket, now)
        if stay_s <= self._rules.move_s:
            return None
        avoid |= {peer.name}
        others = [each for each in self._some(self._ranks) if self._welcome(each, now, avoid)]
        if not others:
            return None
        other = self._cheapest(others, ticket.chain, now)
        gain_s = stay_s - self._cost_s(other, ticket.chain, now)
        if gain_s <= max(self._rules.move_s, stay_s / 2):
            return None
        self._advance_behind(ticket)
        return self._give(other, ticket.chain, now, task)

    def _give(self, peer: _Peer, chain: PrefixHashes, now: float, task: str | None) -> str:
        own = chain.tokens - self._memory.held_tokens(peer.name, chain)
        ticket = peer.give(chain, own, now)
        if task is not None:
            self._tickets[task] = ticket
            self._tickets.move_to_end(task)
            if len(self._tickets) > MOST_TICKETS:
                self._tickets.popitem(last=False)
        self._memory.note(peer.name, chain)
        return peer.name

    def _advance_behind(self, ticket: _Ticket) -> None:
        """A task leaves its place, and those behind it are nearer to theirs."""
        for later in reversed(self._tickets.values()):
            if later is ticket:
                return
            if later.replica == ticket.replica:
                later.tokens -= ticket.own_tokens
                later.requests -= 1

    def _stay_s(self, peer: _Peer, ticket: _Ticket, now: float) -> float:
        """How long the task's first token still takes where it waits: by what has been done of all
        that stood before it, and no longer than for all that is there."""
        load, speed = peer.load, self._speed(peer)
        done = load.computed_tokens - ticket.computed_tokens
        tokens = min(ticket.tokens - done, peer.queued_tokens(now, speed))
        if not load.full:
            return max(0.0, tokens / speed)
        before = ticket.requests - (load.started - ticket.started)
        starts = min(before, load.waiting + len(peer.given))
        return max(0.0, tokens / speed, starts / self._turns_per_s(peer))

    def _turns_per_s(self, peer: _Peer) -> float:
        return peer.starts_per_s.value or self._starts_per_s.value or STARTS_PER_S

    def _best(self, chain: PrefixHashes, now: float, avoid: frozenset[str]) -> _Peer:
        known = self._memory.holders(chain, at_most=self._rules.holders)
        holders = [peer for name in known if self._welcome(peer := self._peers[name], now, avoid)]
        if not holders:
            return self._cheapest(self._drawn(now, avoid), chain, now)
        holder = self._cheapest(holders, chain, now)
        if self._wait_s(holder, now) <= self._rules.patience_s:
            return holder
        other = self._cheapest(self._drawn(now, avoid), chain, now)
        return other if self._overloaded(holder, other, chain, now) else holder

    def _overloaded(self, holder: _Peer, other: _Peer, chain: PrefixHashes, now: float) -> bool:
        held = self._memory.held_tokens(holder.name, chain)
        again = max(0, held - self._memory.held_tokens(other.name, chain))
        price_s = (self._rules.loyalty - 1) * again / self._speed(other)
        gain_s = self._cost_s(holder, chain, now) - self._cost_s(other, chain, now)
        return gain_s > self._rules.patience_s + price_s

    def _cheapest(self, peers: Sequence[_Peer], chain: PrefixHashes, now: float) -> _Peer:
        if len(peers) == 1:
            return peers[0]
        return min(peers, key=lambda peer: self._cost_s(peer, chain, now))

    def _cost_s(self, peer: _Peer, chain: PrefixHashes, now: float) -> float:
        """How long the task's first token would take."""
        own = chain.tokens - self._memory.held_tokens(peer.name, chain)
        return self._wait_s(peer, now) + own / self._speed(peer)

    def _wait_s(self, peer: _Peer, now: float) -> float:
        """How long until the replica would begin with one more prompt."""
        speed = self._speed(peer)
        tokens = peer.queued_tokens(now, speed) + self._rules.running_tokens * peer.requests
        unplaced = peer.unplaced
        if not unplaced:
            return tokens / speed
        return max(tokens / speed, unplaced / self._turns_per_s(peer))

    def _speed(self, peer: _Peer) -> float:
        return peer.load.tokens_per_s or self._tokens_per_s.value or TOKENS_PER_S

    def _drawn(self, now: float, avoid: frozenset[str]) -> list[_Peer]:
        """Some that are welcome, at random; whoever there is where none is."""
        drawn = [peer for peer in self._some(self._ranks) if self._welcome(peer, now, avoid)]
        return drawn or self._some(
            [peer for peer in self._ranks if self._welcome(peer, now, avoid)]
            or [peer for peer in self._ranks if peer.name not in avoid]
            or self._ranks
        )

    def _some(self, peers: list[_Peer]) -> list[_Peer]:
        """All of them where they are few; in any order, so that equals take turns."""
        few = len(peers) <= self._rules.samples + 1
        return self._random.sample(peers, len(peers) if few else self._rules.samples)

    def _welcome(self, peer: _Peer, now: float, avoid: frozenset[str]) -> bool:
        if peer.name in avoid or now < peer.doubted_until:
            return False
        return peer.heard_at is None or now - peer.heard_at <= self._rules.silent_s
