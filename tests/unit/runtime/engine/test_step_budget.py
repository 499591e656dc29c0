"""Steps adapt to a target for the gaps of streams, on a simulated device and its clock."""

import random
from dataclasses import dataclass, field
from functools import partial

import pytest

from runtime.engine.draft_proposals import DraftProposals
from runtime.engine.drafter import Drafter, DraftLimits
from runtime.engine.engine import Engine, EngineLimits
from runtime.engine.request import (
    Delta,
    GenerationRequest,
    ImageSpan,
    Result,
    Sampled,
    StopRules,
)
from runtime.engine.scheduler import Scheduler
from runtime.engine.speculation import Speculation
from runtime.engine.step_budget import LEAST_TOKENS, StepBudget
from runtime.engine.step_plan import StepPlan
from runtime.kv.cache_kinds import Full
from runtime.kv.cache_manager import KVCacheManager
from tests.unit.runtime.engine.test_scheduler import looking, request, results

MS = 1_000_000
STREAMS, PROMPTS, PROMPT_TOKENS = 8, 20, 3000
STEP_TOKENS = 512


@dataclass(frozen=True)
class Device:
    """Milliseconds of a step, of a row, and of a row at each of 1,000 positions before it.

    `noise`: standard deviation of a step's time, relative to it. `host`: between steps.
    """

    step: float = 8.0
    row: float = 0.2
    thousand: float = 0.02
    noise: float = 0.0
    host: float = 0.5

    def duration(self, plan: StepPlan) -> float:
        rows = sum(c.length * (self.row + self.thousand * c.start / 1000) for c in plan.chunks)
        return self.step + rows


class Clock:
    """Of all devices together, which compute one after the other."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, ms: float) -> None:
        self.now_ns += int(MS * ms)


class TimedRunner:
    """Advances the clock by the time of each step; its results are all the same but for `wrong`,
    the share of those that are not."""

    def __init__(self, device: Device, clock: Clock, *, wrong: float = 0.0) -> None:
        self.device, self.clock, self.wrong = device, clock, wrong
        self.random = random.Random(1)
        self.prompts: list[int] = []  # prompt tokens of each step

    def launch(self, plan: StepPlan) -> StepPlan:
        return plan

    def collect(self, launched: StepPlan) -> tuple[Result, ...]:
        noise = max(0.5, self.random.gauss(1.0, self.device.noise))
        self.clock.advance(self.device.duration(launched) * noise)
        self.prompts.append(sum(c.length for c in launched.chunks if c.length > 1))
        return tuple(map(self._perhaps_wrong, results(launched)))

    def _perhaps_wrong(self, result: Sampled | None) -> Sampled | None:
        changed = result is not None and self.wrong and self.random.random() < self.wrong
        return Sampled(8) if changed else result


@dataclass
class Measured:
    gaps_ms: list[float] = field(default_factory=list)  # of streams, while prompts are computed
    prompts_s: float = 0.0  # until all prompts are computed
    tokens_per_s: float = 0.0
    prompt_steps: list[int] = field(default_factory=list)
    drafted: int = 0  # tokens

    @property
    def p99(self) -> float:
        return sorted(self.gaps_ms)[int(0.99 * len(self.gaps_ms))]


class Simulation:
    """Prompts arrive beside streams, two at a time. `draft`: the device of a draft model."""

    def __init__(
        self, device: Device, target_ms: float | None, depth: int, draft: Device | None
    ) -> None:
        self.clock, self.measured = Clock(), Measured()
        self.runner = TimedRunner(device, self.clock)
        budget = StepBudget(int(target_ms * MS), step_tokens=STEP_TOKENS) if target_ms else None
        slots = STREAMS + 2
        cache_manager = KVCacheManager([Full()], [5000], page_tokens=16, prefix_cache=False)
        scheduler = Scheduler(
            cache_manager, slots=slots, step_tokens=STEP_TOKENS, step_budget=budget
        )
        if draft is not None:
            drafter = drafter_of(TimedRunner(draft, self.clock, wrong=0.2), slots, depth, budget)
            scheduler.speculation = Speculation(
                draws=5 * slots, overlaps=depth > 1, drafts=DraftProposals(drafter, most=4)
            )
        self.engine = Engine(
            scheduler,
            self.runner,
            token_bytes=lambda token: b"x",
            limits=EngineLimits(100_000, 100, max_live=STREAMS + PROMPTS, slots=slots),
            depth=depth,
            clock=self.clock,
        )
        self.seen: dict[str, int] = {}  # when streams got their last tokens
        self.left = 0  # prompts

    def run(self, *, answer: int) -> Measured:
        streams = [f"s{index}" for index in range(STREAMS)]
        for name in streams:
            self.engine.add(asks(name, 5, 10**5), partial(self._stream, name), arrived=0)
        for _ in range(20):
            self._step()
        self.left, start, first = PROMPTS, self.clock.now_ns, len(self.runner.prompts)
        for number in range(PROMPTS):
            asked = asks(f"p{number}", PROMPT_TOKENS, answer)
            self.engine.add(asked, self._prompt, arrived=start)
        while self.left:
            self._step()
        statistics, measured = self.engine.statistics(), self.measured
        measured.prompts_s = (self.clock.now_ns - start) / MS / 1000
        measured.tokens_per_s = statistics.tokens_per_s or 0.0
        measured.prompt_steps = self.runner.prompts[first:]
        measured.drafted = statistics.drafted_tokens_total
        for name in streams:
            self.engine.abort(name)
        return measured

    def _step(self) -> None:
        self.engine.step()
        self.clock.advance(self.runner.device.host)

    def _stream(self, name: str, delta: Delta) -> None:
        """Tokens that come at the same time have no gap between them."""
        gap_ns = self.clock.now_ns - self.seen.get(name, self.clock.now_ns)
        if self.left and gap_ns:
            self.measured.gaps_ms.append(gap_ns / MS)
        self.seen[name] = self.clock.now_ns

    def _prompt(self, delta: Delta) -> None:
        self.left -= delta.finish is not None


def drafter_of(runner: TimedRunner, slots: int, depth: int, budget: StepBudget | None) -> Drafter:
    limits = DraftLimits(
        step_tokens=STEP_TOKENS,
        draws=2 * slots,
        context_tokens=10**6,
        written_tokens=6,
        vocab_size=100,
        target_vocab_size=100,
        depth=depth,
    )
    cache_manager = KVCacheManager([Full()], [5000], page_tokens=16, prefix_cache=False)
    return Drafter(runner, cache_manager, limits, clock=runner.clock, budget=budget)


def simulate(
    device: Device,
    target_ms: float | None,
    depth: int = 1,
    *,
    draft: Device | None = None,
    answer: int = 1,
) -> Measured:
    return Simulation(device, target_ms, depth, draft).run(answer=answer)


def asks(name: str, tokens: int, answer: int) -> GenerationRequest:
    return GenerationRequest(name, (1,) * tokens, StopRules(answer))


# With the time that all prompts take, relative to full steps; most of it is that of more steps.
DEVICES = [
    (Device(), 1.4),
    (Device(noise=0.05), 1.45),
    (Device(step=30.0, row=0.02), 4.0),
    (Device(thousand=0.2), 2.0),
]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("device", "slower"), DEVICES)
def test_the_gaps_of_streams_stay_below_the_target_while_prompts_arrive(
    device: Device, slower: float, depth: int
) -> None:
    freely, limited = simulate(device, None, depth), simulate(device, 40.0, depth)
    assert limited.p99 < 40.0 < freely.p99
    assert limited.prompts_s < slower * freely.prompts_s
    assert 0 < limited.tokens_per_s < freely.tokens_per_s, "small steps count for the speed"


# The first one pays beside `Device`, the second one hardly.
DRAFTS = [Device(step=2.0, row=0.05), Device(step=2.0, row=0.05, noise=0.05), Device(4.0, 0.1)]


@pytest.mark.parametrize(("draft", "depth"), zip(DRAFTS, (2, 1, 2), strict=True))
def test_the_steps_of_a_draft_model_count_for_the_gaps(draft: Device, depth: int) -> None:
    """Also those that compute the prompts, whose answers are drafted, too."""
    noise = Device(noise=draft.noise)
    freely, limited = (simulate(noise, t, depth, draft=draft, answer=60) for t in (None, 40.0))
    assert limited.p99 < 40.0 < freely.p99
    assert limited.prompts_s < 2.0 * freely.prompts_s
    assert limited.drafted > 0


def test_prompts_finish_if_the_target_cannot_be_met() -> None:
    limited = simulate(Device(step=60.0), 40.0)
    full = -(-PROMPTS * PROMPT_TOKENS // LEAST_TOKENS)
    assert len(limited.prompt_steps) <= full + PROMPTS
    assert all(limited.prompt_steps)


def limited_scheduler(**sizes: int) -> Scheduler:
    cache_manager = KVCacheManager([Full()], [100], page_tokens=4)
    budget = StepBudget(MS, step_tokens=sizes["step_tokens"])
    return Scheduler(cache_manager, step_budget=budget, **sizes)


def step(scheduler: Scheduler, took_ms: int) -> list[tuple[int, int]]:
    """Start and length of each chunk; the step takes so long that the least is offered."""
    plan = scheduler.plan()
    assert plan is not None and scheduler.step_budget is not None
    scheduler.step_budget.observe(plan, took_ms * MS, 0)
    list(scheduler.retire(plan, results(plan)))
    return [(chunk.start, chunk.length) for chunk in plan.chunks]


def test_without_streams_prompts_fill_the_steps() -> None:
    scheduler = limited_scheduler(slots=2, step_tokens=64)
    scheduler.add(request("a", 90))
    assert [step(scheduler, 50) for _ in range(2)] == [[(0, 64)], [(64, 26)]]
    scheduler.add(request("bb", 90))
    assert step(scheduler, 50) == [(90, 1), (0, LEAST_TOKENS)]


def test_an_image_that_must_stay_whole_is_computed_whole() -> None:
    scheduler = limited_scheduler(slots=2, step_tokens=64)
    scheduler.add(request("a", 3, count=50))
    step(scheduler, 50)
    scheduler.add(looking("b", 70, ImageSpan(10, 40, True, b"x")))
    steps = [step(scheduler, 50)[1:] for _ in range(4)]
    assert steps == [[(0, 10)], [(10, 40)], [(50, 16)], [(66, 4)]]


def test_one_slow_step_is_forgotten() -> None:
    scheduler = limited_scheduler(slots=2, step_tokens=64)
    scheduler.add(request("a", 3, count=200))
    step(scheduler, 0)
    step(scheduler, 5000)
    for number in range(20):
        scheduler.add(request("b" * (2 + number), 60, count=1))
        longest = 0
        while len(scheduler.running) + len(scheduler.waiting) > 1:
            longest = max(longest, *(length for _, length in step(scheduler, 0)))
    assert longest == 60
