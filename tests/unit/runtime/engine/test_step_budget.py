"""Steps adapt to a target for the gaps of streams, on a simulated device and its clock."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from runtime.engine.engine import Engine, EngineLimits
from runtime.engine.request import Delta, GenerationRequest, ImageSpan, Result, StopRules
from runtime.engine.scheduler import Scheduler
from runtime.engine.step_budget import LEAST_TOKENS, StepBudget
from runtime.engine.step_plan import StepPlan
from runtime.kv.cache_manager import KVCacheManager
from runtime.kv.spec import Full
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


class TimedRunner:
    """Advances the clock by the time of each step; its results are all the same."""

    def __init__(self, device: Device) -> None:
        self.now_ns, self.device, self.random = 0, device, random.Random(1)
        self.prompts: list[int] = []  # prompt tokens of each step

    def launch(self, plan: StepPlan) -> StepPlan:
        return plan

    def collect(self, launched: StepPlan) -> tuple[Result, ...]:
        noise = max(0.5, self.random.gauss(1.0, self.device.noise))
        self.now_ns += int(MS * self.device.duration(launched) * noise)
        self.prompts.append(sum(c.length for c in launched.chunks if c.length > 1))
        return results(launched)


@dataclass
class Measured:
    gaps_ms: list[float] = field(default_factory=list)  # of streams, while prompts are computed
    prompts_s: float = 0.0  # until all prompts are computed
    tokens_per_s: float = 0.0
    prompt_steps: list[int] = field(default_factory=list)

    @property
    def p99(self) -> float:
        return sorted(self.gaps_ms)[int(0.99 * len(self.gaps_ms))]


def simulate(device: Device, target_ms: float | None, depth: int = 1) -> Measured:
    """Prompts arrive beside streams, two at a time."""
    runner, measured = TimedRunner(device), Measured()
    budget = target_ms and StepBudget(int(target_ms * MS), step_tokens=STEP_TOKENS)
    slots = STREAMS + 2
    cache_manager = KVCacheManager([Full()], [4000], page_tokens=16, prefix_cache=False)
    engine = Engine(
        Scheduler(cache_manager, slots=slots, step_tokens=STEP_TOKENS, step_budget=budget or None),
        runner,
        token_bytes=lambda token: b"x",
        limits=EngineLimits(100_000, 100, max_live=STREAMS + PROMPTS, slots=slots),
        depth=depth,
        clock=lambda: runner.now_ns,
    )
    seen: dict[int, int] = {}
    left = PROMPTS

    def stream(index: int) -> Callable[[Delta], None]:
        def deliver(delta: Delta) -> None:
            if index in seen and left and begun:
                measured.gaps_ms.append((runner.now_ns - seen[index]) / MS)
            seen[index] = runner.now_ns

        return deliver

    def prompt(delta: Delta) -> None:
        nonlocal left
        left -= delta.finish is not None

    def step() -> None:
        engine.step()
        runner.now_ns += int(MS * device.host)

    begun = False
    for index in range(STREAMS):
        engine.add(asks(f"s{index}", 5, 10**5), stream(index), arrived=0)
    for _ in range(20):
        step()
    begun, start, first = True, runner.now_ns, len(runner.prompts)
    for number in range(PROMPTS):
        engine.add(asks(f"p{number}", PROMPT_TOKENS, 1), prompt, arrived=start)
    while left:
        step()
    measured.prompts_s = (runner.now_ns - start) / MS / 1000
    measured.tokens_per_s = engine.statistics().tokens_per_s or 0.0
    measured.prompt_steps = runner.prompts[first:]
    for index in range(STREAMS):
        engine.abort(f"s{index}")
    return measured


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
