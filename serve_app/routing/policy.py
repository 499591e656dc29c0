"""Chooses the replica that is expected to produce a request's first token soonest.

That is the replica with the longest known cached prefix unless it is overloaded, otherwise the one
with the least queued work, counted in tokens. Every cost is an estimate in seconds until the first
token: the queue of the replica, then the part of the prompt that it has to compute. A queued
request may be moved to another replica later. This module uses plain values and the standard
library only, so `bench/simulate.py` runs the same code.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from serve_app.messages.replica_load import PrefixHashes, ReplicaLoad
from serve_app.routing.prefix_memory import PrefixMemory

# Defaults until any replica has reported a measured value.
TOKENS_PER_S = 1000.0
STARTS_PER_S = 1.0
# Weight of a new value in a running average.
NEW = 0.3
# The rate at which requests start is measured over periods of at least this length.
START_RATE_PERIOD_S = 0.5
# Maximum number of queued requests that can be moved; older ones stay where they are.
MAX_QUEUE_POSITIONS = 4096


@dataclass(frozen=True, slots=True)
class PolicyRules:
    """Parameters of the policy. bench/RESULTS.md and bench/NOTES.md compare other values.

    `samples`: random candidates besides at most `holders` replicas that hold the longest prefix. A
    holder is overloaded if another replica would start earlier by more than `patience_s`, where the
    time to recompute the prefix there counts `recompute_weight` times: other requests wait for it
    too. `running_tokens`: cost of a running sequence in queued tokens. `report_lag_s`,
    `report_lag_token_s`: time, fixed and per prompt token, after which the replica's own report
    includes a request. `silent_s`: a replica without reports for this long is skipped. `doubt_s`:
    how long a replica with a broken connection is skipped. `move_s`: a queued request is moved if
    it starts at least this much earlier and in half the time.
    """

    samples: int = 4
    holders: int = 4
    patience_s: float = 0.1
    recompute_weight: float = 3.0
    running_tokens: int = 32
    report_lag_s: float = 0.1
    report_lag_token_s: float = 5e-6
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
class _QueuePosition:
    """A request's position in a replica's queue when it was assigned.

    `tokens`: queued prompt tokens up to and including the request's `own_tokens`. `requests`:
    requests that have not started, itself included. `computed_tokens`, `started`: the replica's
    totals in its latest report at that time.
    """

    replica: str
    hashes: PrefixHashes
    own_tokens: int
    tokens: int
    requests: int
    computed_tokens: int
    started: int


@dataclass(eq=False, slots=True)
class _Replica:
    """A replica's latest report, and the requests assigned since then, which the report lacks."""

    name: str
    index: int
    load: ReplicaLoad = field(default_factory=ReplicaLoad)
    reported_at: float | None = None
    doubted_until: float = 0.0
    assigned: deque[tuple[float, int]] = field(default_factory=deque)  # time, tokens to compute
    assigned_tokens: int = 0
    starts_per_s: _Mean = field(default_factory=_Mean)
    rate_since: tuple[float, int] | None = None  # start of the measured period, `started` then

    def assign(self, hashes: PrefixHashes, tokens: int, now: float) -> _QueuePosition:
        """`tokens`: the part of the prompt that the replica has to compute."""
        self.assigned.append((now, tokens))
        self.assigned_tokens += tokens
        load = self.load
        return _QueuePosition(
            self.name,
            hashes,
            tokens,
            load.queued_tokens + self.assigned_tokens,
            load.waiting + len(self.assigned),
            load.computed_tokens,
            load.started,
        )

    def update(self, load: ReplicaLoad, now: float, rules: PolicyRules) -> None:
        self._measure_starts(load, now)
        self.load, self.reported_at, self.doubted_until = load, now, 0.0
        while self.assigned:
            at, tokens = self.assigned[0]
            if at + rules.report_lag_s + rules.report_lag_token_s * tokens > now:
                return
            self.assigned.popleft()
            self.assigned_tokens -= tokens

    def queued_tokens(self, now: float, tokens_per_s: float) -> float:
        """Estimated number of queued tokens: those reported and those assigned since, minus those
        computed since at `tokens_per_s`. Assigned tokens count as being computed only from the time
        of the last assignment."""
        reported_at = now if self.reported_at is None else self.reported_at
        last = self.assigned[-1][0] if self.assigned else reported_at
        queued = max(0.0, self.load.queued_tokens - tokens_per_s * (last - reported_at))
        return max(0.0, queued + self.assigned_tokens - tokens_per_s * (now - last))

    @property
    def requests(self) -> int:
        return self.load.running + self.load.waiting + len(self.assigned)

    @property
    def requests_before_slot(self) -> int:
        """Number of requests that must start or end before a further request gets a slot."""
        load = self.load
        if load.full:
            return self.requests + 1 - load.running
        return max(0, self.requests + 1 - load.slots) if load.slots else 0

    def _measure_starts(self, load: ReplicaLoad, now: float) -> None:
        if not load.full:
            self.rate_since = None
        elif self.rate_since is None:
            self.rate_since = now, load.started
        elif now - self.rate_since[0] >= START_RATE_PERIOD_S and load.started > self.rate_since[1]:
            since, started = self.rate_since
            self.starts_per_s.add((load.started - started) / (now - since))
            self.rate_since = now, load.started


class RoutingPolicy:
    """Chooses among the replicas of one deployment. All times are of one monotonic clock. `memory`
    may be shared with policies of other deployments, whose replicas have other names."""

    def __init__(
        self,
        rules: PolicyRules | None = None,
        *,
        memory: PrefixMemory | None = None,
        random: Random | None = None,
    ) -> None:
        self._rules = rules or PolicyRules()
        self._memory = PrefixMemory() if memory is None else memory
        self._random = Random() if random is None else random
        self._by_name: dict[str, _Replica] = {}
        self._listed: list[_Replica] = []  # the same replicas, for drawing samples
        self._positions: OrderedDict[str, _QueuePosition] = (
            OrderedDict()
        )  # by request, oldest first
        self._tokens_per_s = _Mean()
        self._starts_per_s = _Mean()

    @property
    def replicas(self) -> frozenset[str]:
        return frozenset(self._by_name)

    def add(self, replica: str) -> None:
        """Adds a replica. It counts as idle until it reports."""
        assert replica not in self._by_name
        self._by_name[replica] = added = _Replica(replica, len(self._listed))
        self._listed.append(added)
        self._memory.set_clock(replica, computed_tokens=0, cache_tokens=1)

    def remove(self, replica: str) -> None:
        """Removes a replica for good."""
        removed = self._by_name.pop(replica)
        last = self._listed.pop()
        if last is not removed:
            self._listed[removed.index] = last
            last.index = removed.index
        self._memory.remove(replica)

    def report(self, replica: str, load: ReplicaLoad, *, now: float) -> None:
        """Records a load report; reports of removed replicas are ignored."""
        known = self._by_name.get(replica)
        if known is None:
            return
        known.update(load, now, self._rules)
        if load.tokens_per_s is not None:
            self._tokens_per_s.add(load.tokens_per_s, NEW / len(self._by_name))
        if known.starts_per_s.value is not None:
            self._starts_per_s.add(known.starts_per_s.value, NEW / len(self._by_name))
        self._memory.set_clock(
            replica, computed_tokens=load.computed_tokens, cache_tokens=load.cache_tokens
        )

    def record_prompt(self, replica: str, hashes: PrefixHashes) -> None:
        """Records a prompt that any ingress has sent to the replica."""
        self._memory.record(replica, hashes)

    def doubt(self, replica: str, *, now: float) -> None:
        """Skips the replica for `doubt_s` or until it reports again."""
        known = self._by_name.get(replica)
        if known is not None:
            known.doubted_until = now + self._rules.doubt_s

    def choose(
        self,
        hashes: PrefixHashes,
        *,
        now: float,
        avoid: frozenset[str] = frozenset(),
        unable: frozenset[str] = frozenset(),
        request: str | None = None,
    ) -> str | None:
        """The replica that the request is assigned to; None if there are no replicas.

        A replica in `avoid` or in doubt is chosen only if there is no other, and one in `unable`,
        which cannot serve the request, only after those. `request`: the request's id, if
        `choose_earlier` may be called for it.
        """
        if not self._by_name:
            return None
        return self._assign(self._best(hashes, now, avoid, unable), hashes, now, request)

    def choose_earlier(
        self, request: str, *, now: float, avoid: frozenset[str] = frozenset()
    ) -> str | None:
        """Reassigns a queued request to a replica that would start it far earlier, such as one that
        was added since; None if it should stay."""
        position = self._positions.get(request)
        current = None if position is None else self._by_name.get(position.replica)
        if position is None or current is None:
            return None
        stay_s = self._remaining_s(current, position, now)
        if stay_s <= self._rules.move_s:
            return None
        avoid |= {current.name}
        others = [each for each in self._sample(self._listed) if self._usable(each, now, avoid)]
        if not others:
            return None
        other = self._cheapest(others, position.hashes, now)
        gain_s = stay_s - self._cost_s(other, position.hashes, now)
        if gain_s <= max(self._rules.move_s, stay_s / 2):
            return None
        self._advance_behind(position)
        return self._assign(other, position.hashes, now, request)

    def _assign(
        self, replica: _Replica, hashes: PrefixHashes, now: float, request: str | None
    ) -> str:
        self._retract(request)
        own = hashes.tokens - self._memory.held_tokens(replica.name, hashes)
        position = replica.assign(hashes, own, now)
        if request is not None:
            self._positions[request] = position
            self._positions.move_to_end(request)
            if len(self._positions) > MAX_QUEUE_POSITIONS:
                self._positions.popitem(last=False)
        self._memory.record(replica.name, hashes)
        return replica.name

    def _retract(self, request: str | None) -> None:
        """Forgets the prompt that a request, which was refused or is moved, left at its replica."""
        earlier = None if request is None else self._positions.get(request)
        if earlier is not None:
            held = earlier.hashes.tokens - earlier.own_tokens
            self._memory.retract(earlier.replica, earlier.hashes, held_tokens=held)

    def _advance_behind(self, position: _QueuePosition) -> None:
        """Advances the requests that were queued behind one that leaves the queue."""
        for later in reversed(self._positions.values()):
            if later is position:
                return
            if later.replica == position.replica:
                later.tokens -= position.own_tokens
                later.requests -= 1

    def _remaining_s(self, replica: _Replica, position: _QueuePosition, now: float) -> float:
        """Estimated time until a queued request's first token on its current replica, from the work
        done since it was assigned; at most the time for the whole queue."""
        load, speed = replica.load, self._speed(replica)
        done = load.computed_tokens - position.computed_tokens
        tokens = min(position.tokens - done, replica.queued_tokens(now, speed))
        if not load.full:
            return max(0.0, tokens / speed)
        before = position.requests - (load.started - position.started)
        starts = min(before, load.waiting + len(replica.assigned))
        return max(0.0, tokens / speed, starts / self._start_rate(replica))

    def _start_rate(self, replica: _Replica) -> float:
        return replica.starts_per_s.value or self._starts_per_s.value or STARTS_PER_S

    def _best(
        self, hashes: PrefixHashes, now: float, avoid: frozenset[str], unable: frozenset[str]
    ) -> _Replica:
        names = self._memory.holders(hashes, limit=self._rules.holders)
        known = [self._by_name[name] for name in names if name in self._by_name]
        excluded = avoid | unable
        holders = [holder for holder in known if self._usable(holder, now, excluded)]
        if not holders:
            return self._cheapest(self._candidates(now, avoid, unable), hashes, now)
        holder = self._cheapest(holders, hashes, now)
        if self._queue_s(holder, now) <= self._rules.patience_s:
            return holder
        other = self._cheapest(self._candidates(now, avoid, unable), hashes, now)
        return other if self._overloaded(holder, other, hashes, now) else holder

    def _overloaded(
        self, holder: _Replica, other: _Replica, hashes: PrefixHashes, now: float
    ) -> bool:
        held = self._memory.held_tokens(holder.name, hashes)
        recomputed = max(0, held - self._memory.held_tokens(other.name, hashes))
        price_s = (self._rules.recompute_weight - 1) * recomputed / self._speed(other)
        gain_s = self._cost_s(holder, hashes, now) - self._cost_s(other, hashes, now)
        return gain_s > self._rules.patience_s + price_s

    def _cheapest(self, replicas: Sequence[_Replica], hashes: PrefixHashes, now: float) -> _Replica:
        if len(replicas) == 1:
            return replicas[0]
        return min(replicas, key=lambda replica: self._cost_s(replica, hashes, now))

    def _cost_s(self, replica: _Replica, hashes: PrefixHashes, now: float) -> float:
        """Estimated time until a new request's first token."""
        own = hashes.tokens - self._memory.held_tokens(replica.name, hashes)
        return self._queue_s(replica, now) + own / self._speed(replica)

    def _queue_s(self, replica: _Replica, now: float) -> float:
        """Estimated time until the replica would start to compute one more prompt."""
        speed = self._speed(replica)
        running_tokens = self._rules.running_tokens * replica.requests
        queue_s = (replica.queued_tokens(now, speed) + running_tokens) / speed
        before = replica.requests_before_slot
        return max(queue_s, before / self._start_rate(replica)) if before else queue_s

    def _speed(self, replica: _Replica) -> float:
        return replica.load.tokens_per_s or self._tokens_per_s.value or TOKENS_PER_S

    def _candidates(
        self, now: float, avoid: frozenset[str], unable: frozenset[str]
    ) -> list[_Replica]:
        """Random usable replicas; if there are none, others that are not excluded. At first `avoid`
        and `unable` are excluded, then only `unable`, then none."""
        excluded = avoid | unable
        drawn = [each for each in self._sample(self._listed) if self._usable(each, now, excluded)]
        if drawn:
            return drawn
        for excluded in (avoid | unable, unable):
            left = [each for each in self._listed if each.name not in excluded]
            usable = [each for each in left if self._usable(each, now, excluded)]
            if left:
                return self._sample(usable or left)
        return self._sample(self._listed)

    def _sample(self, replicas: list[_Replica]) -> list[_Replica]:
        """A random sample in random order, so that equal replicas take turns; all if they are
        few."""
        few = len(replicas) <= self._rules.samples + 1
        return self._random.sample(replicas, len(replicas) if few else self._rules.samples)

    def _usable(self, replica: _Replica, now: float, avoid: frozenset[str]) -> bool:
        if replica.name in avoid or now < replica.doubted_until:
            return False
        return replica.reported_at is None or now - replica.reported_at <= self._rules.silent_s
