"""The number of replicas of a deployment, from the load that its replicas report.

Pure: a decision depends on `Observation` and on the `ScalingState` that the last one returned.
Standard library only, like `load_metrics`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from serve_app.autoscaling.load_metrics import (
    History,
    LoadShares,
    ScalingMetrics,
    ScalingTargets,
    load_shares,
    measured_speed,
    throughput_share,
)

# More replicas are needed above this mean load, where each replica counts as full at most: new
# requests are routed to the least loaded replicas, so a full replica beside free ones is no
# problem.
FULL = 0.9


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """When the number of replicas changes.

    Upscaling: when there have been too few replicas for `upscale_delay_s`. Downscaling: when fewer
    replicas, each loaded to at most `downscale_load` of its targets, have been enough for
    `downscale_delay_s`; to zero after `zero_delay_s` without work. A replica whose last report is
    older than `silent_s` may be busy, which prevents downscaling, and so do operations: Serve
    chooses which replica is stopped. Decisions do not wait for a replica that has not reported
    within `start_timeout_s`.
    """

    targets: ScalingTargets = field(default_factory=ScalingTargets)
    upscale_delay_s: float = 4.0
    downscale_delay_s: float = 300.0
    zero_delay_s: float = 300.0
    downscale_load: float = 0.75
    silent_s: float = 7.0
    start_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Observation:
    """The deployment at `now`, in seconds of this process's clock.

    `target`: the requested number of replicas. `running`: the running replicas with their reports,
    oldest first. `held_requests`: number of requests that wait for a replica to start.
    """

    now: float
    target: int
    min_replicas: int
    max_replicas: int
    running: Mapping[str, tuple[ScalingMetrics, ...]]
    held_requests: float = 0.0

    @property
    def reporting(self) -> dict[str, History]:
        return {name: history for name, history in self.running.items() if history}

    @property
    def requests(self) -> int:
        histories = self.reporting.values()
        return math.ceil(sum(history[-1].requests for history in histories) + self.held_requests)

    @property
    def has_operations(self) -> bool:
        return any(history[-1].operations for history in self.reporting.values())


@dataclass(frozen=True, slots=True)
class LastReport:
    """The last report of a replica: its own time, and the time at which it was first seen here.

    Clocks of nodes may differ, so ages are computed from `seen_at`.
    """

    at: float
    seen_at: float
    steps_total: float


@dataclass(frozen=True, slots=True)
class ScalingState:
    """The state that one decision passes to the next; times are those of `Observation.now`.

    `short_since`: since when more replicas have been needed. `spare_since`, `spare_peak`: since
    when fewer have been enough, and the maximum needed since then. `missing_since`: since when a
    requested or lost replica has not reported. `active_at`: the last time at which there was work.
    `expected`: for each signal, the load beyond full replicas for which replicas have already been
    requested. `work_per_s`: the last known mean speed of a replica.
    """

    target: int | None = None
    decided_at: float = 0.0
    short_since: float | None = None
    spare_since: float | None = None
    spare_peak: int = 0
    missing_since: float | None = None
    active_at: float = 0.0
    expected: LoadShares = field(default_factory=LoadShares)
    work_per_s: float = 0.0
    last_reports: Mapping[str, LastReport] = field(default_factory=dict)


def decide(
    rules: ScalingRules, observed: Observation, state: ScalingState
) -> tuple[int, ScalingState]:
    """The number of replicas to request, from `min_replicas` to `max_replicas`."""
    now = observed.now
    if now < state.decided_at:
        state = _shifted(state, now - state.decided_at)
    state = _observe(observed, state)
    loads = [
        load_shares(h[-1], rules.targets, work_per_s=h[-1].work_per_s or state.work_per_s)
        for h in observed.reporting.values()
    ]
    state = replace(state, expected=_expected_load(rules, observed, state, loads))
    most = min(observed.requests, observed.max_replicas)
    needed = min(_needed(loads, state.expected), most)
    enough = max(1, needed, min(_enough(rules, observed, state, loads), most))
    state = _with_delays(rules, observed, state, needed=needed, enough=enough)
    target = observed.target
    if state.short_since is not None and now - state.short_since >= rules.upscale_delay_s:
        target = needed
    elif observed.min_replicas == 0 and _is_idle(rules, observed, state):
        target = 0
    elif state.spare_since is not None and now - state.spare_since >= rules.downscale_delay_s:
        target = state.spare_peak
    target = max(observed.min_replicas, min(target, observed.max_replicas))
    return target, replace(_with_target(state, target, now), decided_at=now)


def _shifted(state: ScalingState, seconds: float) -> ScalingState:
    """The state with all times shifted, after the clock was set back; delays go on."""

    def shift(since: float | None) -> float | None:
        return None if since is None else since + seconds

    return replace(
        state,
        short_since=shift(state.short_since),
        spare_since=shift(state.spare_since),
        missing_since=shift(state.missing_since),
        active_at=state.active_at + seconds,
        last_reports={
            name: replace(last, seen_at=last.seen_at + seconds)
            for name, last in state.last_reports.items()
        },
    )


def _observe(observed: Observation, state: ScalingState) -> ScalingState:
    """The state, updated with the observation."""
    now, reporting = observed.now, observed.reporting
    active = observed.held_requests or _has_worked(reporting, state.last_reports)
    state = _with_target(state, observed.target, now)
    missing_since = now if state.missing_since is None else state.missing_since
    return replace(
        state,
        active_at=now if active else state.active_at,
        missing_since=missing_since if len(reporting) < observed.target else None,
        last_reports=_last_reports(observed, state.last_reports),
        work_per_s=_mean_speed(reporting) or state.work_per_s,
    )


def _with_target(state: ScalingState, target: int, now: float) -> ScalingState:
    """Restarts the delays if the target has changed, here or elsewhere.

    A raised target also restarts the time within which the missing replicas should report.
    """
    if target == state.target:
        return state
    raised = state.target is None or target > state.target
    return replace(
        state,
        target=target,
        short_since=None,
        spare_since=None,
        missing_since=now if raised else state.missing_since,
        active_at=now if raised else state.active_at,
    )


def _has_worked(reporting: Mapping[str, History], last_reports: Mapping[str, LastReport]) -> bool:
    """Whether a replica has requests or operations, or has had requests since its last report."""
    return any(
        history[-1].requests
        or history[-1].operations
        or (name in last_reports and last_reports[name].steps_total != history[-1].steps_total)
        for name, history in reporting.items()
    )


def _last_reports(observed: Observation, known: Mapping[str, LastReport]) -> dict[str, LastReport]:
    return {
        name: known[name]
        if name in known and known[name].at == history[-1].at
        else LastReport(history[-1].at, observed.now, history[-1].steps_total)
        for name, history in observed.reporting.items()
    }


def _mean_speed(reporting: Mapping[str, History]) -> float:
    """Mean speed of the replicas that know theirs; 0 if none does."""
    speeds = [speed for history in reporting.values() if (speed := measured_speed(history))]
    return sum(speeds) / len(speeds) if speeds else 0.0


def _is_starting(rules: ScalingRules, state: ScalingState, now: float) -> bool:
    """Whether a missing replica is expected to report soon."""
    since = state.missing_since
    return since is not None and now - since < rules.start_timeout_s


def _expected_load(
    rules: ScalingRules, observed: Observation, state: ScalingState, loads: Sequence[LoadShares]
) -> LoadShares:
    """The load beyond full replicas for which no further replicas are requested.

    While replicas start, this is all of the excess. The rest after they have started is queued on
    the older replicas and requires no further ones. If replicas do not start in time, others are
    requested.
    """
    beyond = _excess(loads)
    if _is_starting(rules, state, observed.now):
        return beyond
    if state.missing_since is not None:
        return LoadShares()
    return LoadShares(*map(min, beyond, state.expected))


def _excess(loads: Sequence[LoadShares]) -> LoadShares:
    return LoadShares(*(sum(max(0.0, load - 1) for load in each) for each in _by_signal(loads)))


def _needed(loads: Sequence[LoadShares], expected: LoadShares) -> int:
    """The number of replicas that meet the targets; 0 if the present ones are not full."""
    needed = 0.0
    for each, less in zip(_by_signal(loads), expected, strict=True):
        if sum(min(1.0, load) for load in each) > FULL * len(each):
            needed = max(needed, sum(each) - less)
    return _ceil(needed)


def _enough(
    rules: ScalingRules, observed: Observation, state: ScalingState, loads: Sequence[LoadShares]
) -> int:
    """The number of replicas that carry the load at `downscale_load` of their targets."""
    throughput = sum(
        throughput_share(history, work_per_s=history[-1].work_per_s or state.work_per_s)
        for history in observed.reporting.values()
    )
    return _ceil(max(throughput, *map(sum, _by_signal(loads))) / rules.downscale_load)


def _with_delays(
    rules: ScalingRules, observed: Observation, state: ScalingState, *, needed: int, enough: int
) -> ScalingState:
    """The state with the times since which there have been too few or too many replicas."""
    now, target = observed.now, observed.target
    short_since = now if state.short_since is None else state.short_since
    state = replace(state, short_since=short_since if needed > target else None)
    if enough >= target or observed.has_operations or _is_silent(rules, observed, state):
        return replace(state, spare_since=None)
    if state.spare_since is None:
        return replace(state, spare_since=now, spare_peak=enough)
    return replace(state, spare_peak=max(state.spare_peak, enough))


def _is_silent(rules: ScalingRules, observed: Observation, state: ScalingState) -> bool:
    """Whether the reports of a running replica have stopped."""
    times = (last.seen_at for last in state.last_reports.values())
    return observed.now - min(times, default=observed.now) > rules.silent_s


def _is_idle(rules: ScalingRules, observed: Observation, state: ScalingState) -> bool:
    """Whether the deployment has had no work for the delay. A first replica has the start timeout
    in addition, so that it is not stopped before clients retry."""
    delay_s = rules.zero_delay_s
    if not observed.reporting:
        delay_s = max(delay_s, rules.start_timeout_s)
    return observed.now - state.active_at >= delay_s and not _is_silent(rules, observed, state)


def _by_signal(loads: Sequence[LoadShares]) -> list[tuple[float, ...]]:
    """For each signal, the loads of all replicas."""
    return list(zip(*loads, strict=True)) or [()] * len(LoadShares._fields)


def _ceil(replicas: float) -> int:
    return math.ceil(replicas - 1e-9)
