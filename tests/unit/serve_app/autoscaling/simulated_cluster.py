"""A simulated cluster that scales as the policy decides: prompts, slots, reports, start times."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from serve_app.autoscaling.decision import Observation, ScalingRules, ScalingState, decide
from serve_app.autoscaling.load_metrics import ScalingMetrics

STEP_S = 0.5


@dataclass(eq=False, slots=True)
class Request:
    prompt_tokens: float
    answer_s: float
    arrived_at: float
    remaining_tokens: float = 0.0
    first_token_at: float | None = None

    def __post_init__(self) -> None:
        self.remaining_tokens = self.prompt_tokens


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """`start_s`: until a new replica takes requests; its first report follows `report_s` later."""

    tokens_per_s: float = 1000.0
    slots: int = 16
    start_s: float = 30.0
    report_s: float = 2.0
    reports: int = 5


@dataclass(eq=False, slots=True)
class SimulatedReplica:
    name: str
    ready_at: float
    model: ReplicaModel
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    reports: tuple[ScalingMetrics, ...] = ()
    computed_tokens: float = 0.0
    steps: int = 0
    knows_speed: bool = False

    @property
    def requests(self) -> list[Request]:
        return [*self.running, *self.waiting]

    @property
    def queued_tokens(self) -> float:
        return sum(request.remaining_tokens for request in self.requests)

    def advance(self, now: float) -> None:
        self.steps += bool(self.requests)
        while self.waiting and len(self.running) < self.model.slots:
            self.running.append(self.waiting.popleft())
        budget = self.model.tokens_per_s * STEP_S
        self.knows_speed |= self.queued_tokens > budget
        for request in self.running:
            tokens = min(request.remaining_tokens, budget)
            budget -= tokens
            request.remaining_tokens -= tokens
            self.computed_tokens += tokens
            if not request.remaining_tokens and request.first_token_at is None:
                request.first_token_at = now
        self.running = [
            request
            for request in self.running
            if request.first_token_at is None or now < request.first_token_at + request.answer_s
        ]

    def report(self, now: float) -> None:
        report = ScalingMetrics(
            now,
            running=len(self.running),
            waiting=len(self.waiting),
            slots=self.model.slots,
            queued_work=self.queued_tokens,
            work_per_s=self.model.tokens_per_s if self.knows_speed else 0.0,
            work_total=self.computed_tokens,
            steps_total=self.steps,
        )
        self.reports = (*self.reports, report)[-self.model.reports :]


class Cluster:
    """`nodes` replicas can run at a time; further ones are pending.

    `targets`: each decision that changed the number of replicas, with its time.
    """

    def __init__(
        self,
        rules: ScalingRules,
        *,
        min_replicas: int = 1,
        max_replicas: int = 8,
        nodes: float = inf,
        model: ReplicaModel | None = None,
    ) -> None:
        self.rules, self.nodes = rules, nodes
        self.min_replicas, self.max_replicas = min_replicas, max_replicas
        self.model = model or ReplicaModel()
        self.now = 0.0
        self.state = ScalingState()
        self.replicas = [
            SimulatedReplica(f"r{i}", 0.0 if i < nodes else inf, self.model)
            for i in range(min_replicas)
        ]
        self.draining: list[SimulatedReplica] = []
        self.held: deque[Request] = deque()
        self.requests: list[Request] = []
        self.targets: list[tuple[float, int]] = [(0.0, min_replicas)]
        self._number = min_replicas

    @property
    def target(self) -> int:
        return self.targets[-1][1]

    @property
    def running(self) -> list[SimulatedReplica]:
        return [replica for replica in self.replicas if replica.ready_at <= self.now]

    @property
    def placed(self) -> int:
        return sum(replica.ready_at < inf for replica in self.replicas)

    def send(self, prompt_tokens: float, answer_s: float) -> Request:
        request = Request(prompt_tokens, answer_s, self.now)
        self.requests.append(request)
        self.held.append(request)
        return request

    def run(self, seconds: float, arrivals: Callable[["Cluster"], None] = lambda _: None) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            self._place_pending()
            arrivals(self)
            self._route()
            for replica in [*self.running, *self.draining]:
                replica.advance(self.now)
            if self.now % self.model.report_s < STEP_S:
                for replica in self.running:
                    replica.report(self.now)
            self._scale()

    def lose(self, replica: SimulatedReplica) -> None:
        """The replica dies; as in Serve, a new one is started in its place. Its requests are sent
        again."""
        self.replicas.remove(replica)
        self.held.extend(replica.requests)
        self._start()

    def _place_pending(self) -> None:
        for replica in self.replicas:
            if replica.ready_at == inf and self.placed < self.nodes:
                replica.ready_at = self.now + self.model.start_s

    def _route(self) -> None:
        """Each request goes to the least loaded replica and stays there."""
        while self.held and self.running:
            best = min(self.running, key=lambda each: (each.queued_tokens, len(each.requests)))
            best.waiting.append(self.held.popleft())

    def _scale(self) -> None:
        if self.target == 0:  # Serve decides this case without the policy
            target = 1 if self.held else 0
        else:
            observed = Observation(
                self.now,
                self.target,
                self.min_replicas,
                self.max_replicas,
                {replica.name: replica.reports for replica in self.running},
                len(self.held),
            )
            target, self.state = decide(self.rules, observed, self.state)
        if target != self.target:
            self.targets.append((self.now, target))
        while len(self.replicas) < target:
            self._start()
        while len(self.replicas) > target:
            self._stop()

    def _start(self) -> None:
        self.replicas.append(SimulatedReplica(f"r{self._number}", inf, self.model))
        self._number += 1

    def _stop(self) -> None:
        """As in Serve: one that does not run yet, else the newest."""
        running = self.running
        pending = [replica for replica in self.replicas if replica not in running]
        replica = (pending or running)[-1]
        self.replicas.remove(replica)
        self.draining.append(replica)
