"""The event loop of the simulation: requests arrive; replicas step, report, fail and join."""

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

from bench.simulation.contestants import Make
from bench.simulation.replica import Job, Replica, StepCosts
from bench.simulation.traces import Request, Session
from serve_app.gateway.failover import MAX_MOVES

HEARTBEAT_S = 1.0
RETRY_S = 0.05  # delay before a request of a failed replica is sent to another one


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A cluster: the step costs of each replica, the number of ingresses, and the interval of load
    reports.

    At `fail_at_s`, `failing` replicas fail; each is replaced after `replaced_after_s` by one with
    an empty cache. The last `late` replicas join at `late_s`.
    """

    costs: tuple[StepCosts, ...]
    ingresses: int = 1
    report_every_s: float = 0.1
    fail_at_s: float | None = None
    failing: int = 0
    replaced_after_s: float = 10.0
    late: int = 0
    late_s: float = 0.0


@dataclass(slots=True)
class Outcome:
    """Measurements of a period, in seconds; one entry per request or replica.

    `between_s`: mean time between the tokens of an answer. `busy`: share of the time in which a
    replica was there, also of one that has failed. `decided_s`: CPU time of choosing.
    """

    begin_s: float
    end_s: float
    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    in_time_tokens: int = 0
    computed_tokens: int = 0
    saved_tokens: int = 0
    busy: list[float] = field(default_factory=list)
    decisions: int = 0
    moves: int = 0
    decided_s: float = 0.0

    def covers(self, moment: float) -> bool:
        return self.begin_s <= moment < self.end_s

    def overlap_s(self, begin_s: float, end_s: float) -> float:
        """The seconds of the period between two moments."""
        return max(0.0, min(end_s, self.end_s) - max(begin_s, self.begin_s))


@dataclass(eq=False, slots=True)
class _Sent:
    """`begun`: whether its first token has come, maybe from a replica that has failed since."""

    request: Request
    at: float
    rest: Iterator[tuple[float, Request]]
    begun: bool = False


class World:
    """One run. `in_time_s`: limit of the time to first token for an answer to count as in time."""

    def __init__(
        self, cluster: ClusterSpec, make: Make, *, outcome: Outcome, in_time_s: float
    ) -> None:
        self._cluster = cluster
        self._outcome = outcome
        self._in_time_s = in_time_s
        self._random = Random(0)
        self._replicas: dict[str, Replica] = {}
        self._contestant = make(self._replicas)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()
        self._joined: dict[str, float] = {}
        self._versions: dict[str, int] = {}  # of each replica's next step
        self._reported: dict[str, float] = {}
        self._reporting: set[str] = set()
        self._sent: dict[Request, _Sent] = {}
        self._sessions = 0  # sessions with remaining turns

    def run(self, sessions: list[Session]) -> Outcome:
        self._sessions = len(sessions)
        cluster = self._cluster
        for number, costs in enumerate(cluster.costs):
            late = number >= len(cluster.costs) - cluster.late
            self._at(cluster.late_s if late else 0.0, self._join, f"r{number}", costs)
        if self._cluster.fail_at_s is not None:
            self._at(self._cluster.fail_at_s, self._fail)
        for session in sessions:
            self._at(session.at_s, self._next_turn, session.requests())
        while self._events:
            now, _, happen, arguments = heapq.heappop(self._events)
            happen(now, *arguments)
        for replica in self._replicas.values():
            self._note_busy(replica, self._outcome.end_s)
        return self._outcome

    def _at(self, when: float, happen: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), happen, arguments))

    def _next_turn(self, now: float, rest: Iterator[tuple[float, Request]]) -> None:
        following = next(rest, None)
        if following is None:
            self._sessions -= 1
            return
        pause_s, request = following
        sent = _Sent(request, now + pause_s, rest)
        self._at(sent.at, self._send, sent)

    def _send(self, now: float, sent: _Sent) -> None:
        ingress = self._random.randrange(self._cluster.ingresses)
        begin = time.thread_time()
        name = self._contestant.choose(sent.request, ingress, now)
        self._outcome.decided_s += time.thread_time() - begin
        self._outcome.decisions += 1
        self._sent[sent.request] = sent
        self._enqueue(now, sent.request, ingress, name, 0)

    def _enqueue(self, now: float, request: Request, ingress: int, name: str, moves: int) -> None:
        replica = self._replicas[name]
        before = replica.due
        job = replica.add(request, now)
        if replica.due != before:
            self._schedule(replica)
        self._report_soon(now, replica)
        if self._contestant.moves and moves < MAX_MOVES:
            self._at(now + HEARTBEAT_S, self._reconsider, job, ingress, name, moves)

    def _reconsider(self, now: float, job: Job, ingress: int, name: str, moves: int) -> None:
        """Runs at each heartbeat of the replica while the request is queued there, and may move
        it."""
        replica = self._replicas.get(name)
        if replica is None or job not in replica.waiting:
            return
        begin = time.thread_time()
        earlier = self._contestant.choose_earlier(job.request, ingress, now)
        self._outcome.decided_s += time.thread_time() - begin
        if earlier is None:
            self._at(now + HEARTBEAT_S, self._reconsider, job, ingress, name, moves)
            return
        self._outcome.moves += 1
        replica.drop(job)
        self._contestant.finished(name)
        self._report_soon(now, replica)
        self._enqueue(now, job.request, ingress, earlier, moves + 1)

    def _schedule(self, replica: Replica) -> None:
        version = self._versions[replica.id] = self._versions[replica.id] + 1
        if replica.due is not None:
            self._at(replica.due, self._step, replica, version)

    def _step(self, now: float, replica: Replica, version: int) -> None:
        if self._versions.get(replica.id) != version:
            return
        self._note_work(now, replica)
        started, done = replica.advance(now)
        for job in started:
            self._note_first(now, job)
        for job in done:
            self._end(now, replica, job)
        self._schedule(replica)
        self._report_soon(now, replica)

    def _note_first(self, now: float, job: Job) -> None:
        """A prompt that is computed again after a failure is work, but no other first token."""
        sent = self._sent[job.request]
        begun, sent.begun = sent.begun, True
        if not self._outcome.covers(sent.at):
            return
        self._outcome.saved_tokens += job.hit
        self._outcome.computed_tokens += job.request.tokens - job.hit
        if begun:
            return
        self._outcome.first_s.append(now - sent.at)
        if now - sent.at <= self._in_time_s:
            self._outcome.in_time_tokens += job.request.answer

    def _end(self, now: float, replica: Replica, job: Job) -> None:
        sent = self._sent.pop(job.request)
        if self._outcome.covers(sent.at):
            tokens = max(1, job.request.answer - 1)
            self._outcome.between_s.append((now - job.first_at) / tokens)
        self._contestant.finished(replica.id)
        self._next_turn(now, sent.rest)

    def _report_soon(self, now: float, replica: Replica) -> None:
        """Reports at once if the interval since the last report has passed, otherwise when it has
        passed."""
        if replica.id in self._reporting:
            return
        due = self._reported[replica.id] + self._cluster.report_every_s
        if due <= now:
            self._report(now, replica)
        else:
            self._reporting.add(replica.id)
            self._at(due, self._report, replica)

    def _report(self, now: float, replica: Replica) -> None:
        self._reporting.discard(replica.id)
        if replica.id in self._replicas:
            self._reported[replica.id] = now
            self._contestant.report(replica.id, replica.load(), now)

    def _join(self, now: float, name: str, costs: StepCosts) -> None:
        replica = self._replicas[name] = Replica(name, costs)
        self._joined[name], self._versions[name] = now, 0
        self._contestant.add(name)
        self._heartbeat(now, replica)

    def _heartbeat(self, now: float, replica: Replica) -> None:
        """Replicas report at every heartbeat even if nothing has changed."""
        if replica.id in self._replicas and self._sessions:
            self._report(now, replica)
            self._at(now + HEARTBEAT_S, self._heartbeat, replica)

    def _fail(self, now: float) -> None:
        for name in self._random.sample(sorted(self._replicas), self._cluster.failing):
            replica = self._replicas.pop(name)
            del self._versions[name]
            if replica.due is not None:
                self._note_work(now, replica)
            self._note_busy(replica, now)
            self._contestant.remove(name)
            for job in replica.jobs:
                self._contestant.finished(name)
                self._at(now + RETRY_S, self._send, self._sent[job.request])
            self._at(now + self._cluster.replaced_after_s, self._join, f"{name}'", replica.costs)

    def _note_work(self, now: float, replica: Replica) -> None:
        if self._outcome.covers(replica.begun_at):
            replica.busy_s += now - replica.begun_at

    def _note_busy(self, replica: Replica, gone_at: float) -> None:
        there_s = self._outcome.overlap_s(self._joined[replica.id], gone_at)
        if there_s:
            self._outcome.busy.append(replica.busy_s / there_s)
