"""A pretend cluster that grows and shrinks as the policy says: prompts, places, reports, delays."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from serve_app.autoscaling.decision import Observation, Rules, State, decide
from serve_app.autoscaling.load_metrics import Report

STEP_S = 0.5


@dataclass(eq=False, slots=True)
class Job:
    prompt: float
    answer_s: float
    came_at: float
    left: float = 0.0
    first_at: float | None = None

    def __post_init__(self) -> None:
        self.left = self.prompt


@dataclass(frozen=True, slots=True)
class Costs:
    """`start_s` until a new replica takes requests; its first report comes with the next ones."""

    tokens_per_s: float = 1000.0
    slots: int = 16
    start_s: float = 30.0
    report_s: float = 2.0
    reports: int = 5


@dataclass(eq=False, slots=True)
class Replica:
    name: str
    ready_at: float
    costs: Costs
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    reports: tuple[Report, ...] = ()
    computed: float = 0.0
    steps: int = 0
    knows_speed: bool = False

    @property
    def jobs(self) -> list[Job]:
        return [*self.running, *self.waiting]

    @property
    def queued(self) -> float:
        return sum(job.left for job in self.jobs)

    def advance(self, now: float) -> None:
        costs = self.costs
        self.steps += bool(self.running or self.waiting)
        while self.waiting and len(self.running) < costs.slots:
            self.running.append(self.waiting.popleft())
        budget = costs.tokens_per_s * STEP_S
        self.knows_speed |= self.queued > budget
        for job in self.running:
            took = min(job.left, budget)
            budget -= took
            job.left -= took
            self.computed += took
            if not job.left and job.first_at is None:
                job.first_at = now
        self.running = [
            job for job in self.running if job.first_at is None or now < job.first_at + job.answer_s
        ]

    def report(self, now: float) -> None:
        report = Report(
            now,
            running=len(self.running),
            waiting=len(self.waiting),
            slots=self.costs.slots,
            queued_tokens=self.queued,
            tokens_per_s=self.costs.tokens_per_s if self.knows_speed else 0.0,
            computed_tokens_total=self.computed,
            steps_total=self.steps,
        )
        self.reports = (*self.reports, report)[-self.costs.reports :]


class Cluster:
    """Between `least` and `most` replicas, of which `places` can run at a time; the others are
    pending. `targets`: each decision that changed the number of replicas, with its time."""

    def __init__(
        self,
        rules: Rules,
        *,
        least: int = 1,
        most: int = 8,
        places: float = inf,
        costs: Costs | None = None,
    ) -> None:
        self.rules, self.least, self.most, self.places = rules, least, most, places
        self.costs = costs or Costs()
        self.now = 0.0
        self.state = State()
        self.replicas = [
            Replica(f"r{i}", 0.0 if i < places else inf, self.costs) for i in range(least)
        ]
        self.draining: list[Replica] = []
        self.held: deque[Job] = deque()
        self.jobs: list[Job] = []
        self.targets: list[tuple[float, int]] = [(0.0, least)]
        self._number = least

    @property
    def target(self) -> int:
        return self.targets[-1][1]

    @property
    def running(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.ready_at <= self.now]

    @property
    def placed(self) -> int:
        return sum(replica.ready_at < inf for replica in self.replicas)

    def ask(self, prompt: float, answer_s: float) -> Job:
        job = Job(prompt, answer_s, self.now)
        self.jobs.append(job)
        self.held.append(job)
        return job

    def run(self, seconds: float, arrivals: Callable[["Cluster"], None] = lambda _: None) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            self._place()
            arrivals(self)
            self._give()
            for replica in [*self.running, *self.draining]:
                replica.advance(self.now)
            if self.now % self.costs.report_s < STEP_S:
                for replica in self.running:
                    replica.report(self.now)
            self._decide()

    def lose(self, replica: Replica) -> None:
        """It ends, and one that starts takes its place, as Serve does it. Its requests are asked
        again."""
        self.replicas.remove(replica)
        self.held.extend(replica.jobs)
        self._start()

    def _place(self) -> None:
        """Pending replicas, the oldest first, start as soon as there are places for them."""
        for replica in self.replicas:
            if replica.ready_at == inf and self.placed < self.places:
                replica.ready_at = self.now + self.costs.start_s

    def _give(self) -> None:
        """Each request to the replica with the least to do, and it stays there."""
        while self.held and self.running:
            best = min(self.running, key=lambda replica: (replica.queued, len(replica.jobs)))
            best.waiting.append(self.held.popleft())

    def _decide(self) -> None:
        if self.target == 0:  # as Serve does it
            target = 1 if self.held else 0
        else:
            seen = Observation(
                self.now,
                self.target,
                self.least,
                self.most,
                {replica.name: replica.reports for replica in self.running},
                len(self.held),
            )
            target, self.state = decide(self.rules, seen, self.state)
        if target != self.target:
            self.targets.append((self.now, target))
        while len(self.replicas) < target:
            self._start()
        while len(self.replicas) > target:
            self._stop()

    def _start(self) -> None:
        self.replicas.append(Replica(f"r{self._number}", inf, self.costs))
        self._number += 1

    def _stop(self) -> None:
        """As Serve chooses: one that does not run yet, otherwise the newest."""
        running = self.running
        idle = [replica for replica in self.replicas if replica not in running]
        replica = (idle or running)[-1]
        self.replicas.remove(replica)
        self.draining.append(replica)
