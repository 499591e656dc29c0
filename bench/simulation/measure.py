"""Runs a scenario with each policy and returns the rows of a table."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.percentiles import percentile
from bench.simulation.contestants import OTHERS, Make, Ours
from bench.simulation.scenarios import Scenario
from bench.simulation.traces import sessions
from bench.simulation.world import Outcome, World

OURS = "**ours**"
TRACES = 20
MANY_INGRESSES = 8


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one policy, in seconds."""

    policy: str
    first_s: tuple[float, float, float]  # time to first token: median, 95th and 99th percentile
    between_s: float
    saved: float
    in_time_tokens_per_s: float
    busy: float
    busiest: float
    decision_s: float


@dataclass(frozen=True, slots=True)
class Table:
    """The results of a scenario. `requests`: the number of requests in one policy's run, including
    those outside the measured period."""

    scenario: Scenario
    requests: int
    rows: Sequence[Row]
    wall_s: float


@dataclass(frozen=True, slots=True)
class TraceMeans:
    """Means over several traces. The times to the first token are in seconds."""

    mean_s: float
    median_s: float
    p95_s: float
    longest_s: float
    in_time_tokens_per_s: float


def compared(scenario: Scenario) -> Table:
    """The results of our policy with one ingress and with several, and of the other policies."""
    contestants: dict[str, tuple[Scenario, Make]] = {
        name: (scenario, make) for name, make in OTHERS.items()
    }
    many = scenario.with_ingresses(MANY_INGRESSES)
    contestants[f"{OURS}, one ingress"] = scenario, lambda _: Ours(1)
    contestants[f"{OURS}, {MANY_INGRESSES} ingresses"] = many, lambda _: Ours(MANY_INGRESSES)
    return measured(scenario, contestants)


def measured(scenario: Scenario, contestants: Mapping[str, tuple[Scenario, Make]]) -> Table:
    begin = time.monotonic()
    rows, decisions = [], 0
    for name, (variant, make) in contestants.items():
        outcome = run(variant, make)
        rows.append(_row(name, variant, outcome))
        decisions = outcome.decisions
        print(f"{variant.name}: {name}, {decisions:,} requests", flush=True)
    return Table(scenario, decisions, rows, time.monotonic() - begin)


def over_traces(scenario: Scenario, make: Make, count: int = TRACES) -> TraceMeans:
    """The results of a policy, each the mean over traces that are drawn with different seeds."""
    period_s = scenario.seconds - scenario.warm_s
    found = [
        (
            fmean(outcome.first_s),
            percentile(outcome.first_s, 0.5),
            percentile(outcome.first_s, 0.95),
            max(outcome.first_s),
            outcome.in_time_tokens / period_s,
        )
        for outcome in (run(scenario, make, seed) for seed in range(count))
    ]
    return TraceMeans(*map(fmean, zip(*found, strict=True)))


def run(scenario: Scenario, make: Make, seed: int = 0) -> Outcome:
    """Simulates a policy. The trace does not depend on the policy."""
    trace = sessions(scenario.mix, seconds=scenario.seconds, seed=seed)
    outcome = Outcome(scenario.warm_s, scenario.seconds)
    world = World(scenario.cluster, make, outcome=outcome, in_time_s=scenario.in_time_s)
    return world.run(trace)


def _row(name: str, scenario: Scenario, outcome: Outcome) -> Row:
    p50, p95, p99 = (percentile(outcome.first_s, part) for part in (0.5, 0.95, 0.99))
    prompt_tokens = outcome.saved_tokens + outcome.computed_tokens
    return Row(
        policy=name,
        first_s=(p50, p95, p99),
        between_s=fmean(outcome.between_s),
        saved=outcome.saved_tokens / prompt_tokens,
        in_time_tokens_per_s=outcome.in_time_tokens / (scenario.seconds - scenario.warm_s),
        busy=fmean(outcome.busy),
        busiest=max(outcome.busy),
        decision_s=outcome.decided_s / outcome.decisions,
    )
