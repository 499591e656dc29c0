"""How many replicas there should be: what is known of them in, a number out.

Plain numbers and the standard library only. What is remembered from one decision to the next is
`State`, which the caller keeps.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from serve_app.autoscaling.load_metrics import (
    Backlog,
    History,
    Pressure,
    Report,
    Speeds,
    Targets,
    active_at,
    arriving,
    backlog,
    encoding,
    late,
    pressure,
)

PROMPTS = 0  # of the signals
# Newcomers find no place where so many of the replicas are full.
CROWDED = 0.9
# For how long the speed of encoding is remembered, in seconds of encoding.
ENCODING_MEMORY_S = 30.0
# First tokens tell of requests that came this much earlier.
TTFT_MEMORY_S = 30.0


@dataclass(frozen=True, slots=True)
class Rules:
    """When there are too few replicas, and when too many.

    `upscale_delay_s`: for how long they must have been too few. `downscale_delay_s`: for how long
    fewer must have been enough, with no more than `slack` of the targets on each of them.
    `zero_delay_s`: without any work. `smoothing_s`: over which the load is averaged before fewer
    replicas are given it. `silent_s`: a replica whose reports stay away for so long may be busy.
    `start_timeout_s`: a replica is expected to report within this time from its request; after
    that it delays no decision.
    """

    targets: Targets = field(default_factory=Targets)
    upscale_delay_s: float = 4.0
    downscale_delay_s: float = 300.0
    zero_delay_s: float = 300.0
    slack: float = 0.75
    smoothing_s: float = 30.0
    silent_s: float = 7.0
    start_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Observation:
    """What there is at `now`, in the seconds of the reports.

    `target`: replicas that there should be by the last decision, those that still start among them.
    `running`: those that do, with what they have reported. `held`: requests that wait for one.
    """

    now: float
    target: int
    least: int
    most: int
    running: Mapping[str, tuple[Report, ...]]
    held: float = 0.0

    @property
    def heard(self) -> dict[str, History]:
        return {name: history for name, history in self.running.items() if history}


@dataclass(frozen=True, slots=True)
class News:
    """The last report of a replica: its own time, and that at which it was first seen here.

    Clocks of other nodes may differ; what is told from how long ago it is uses this one's.
    """

    at: float
    seen_at: float


@dataclass(frozen=True, slots=True)
class Losses:
    """When replicas were lost, and which of the running ones may be failing repeatedly.

    `began_at`: the last loss whose replacement is given the start timeout. `last_at`: the last loss
    of any replica. `unproven`: replicas that first reported shortly after a loss, with the time.
    """

    began_at: float = -math.inf
    last_at: float = -math.inf
    unproven: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class State:
    """What past decisions leave.

    `raised_at`: when the target last rose.
    `answered`: of each replica's backlog, what more replicas were started for already: it is no
    reason for still more, though they take over no more of it than pays. `peaks`: when how many
    replicas were needed, the latest last, each less than the one before. `encoded`: images, and the
    seconds they took.
    """

    target: int = 0
    short_since: float | None = None
    active_at: float = 0.0
    settled_at: float = 0.0
    raised_at: float = 0.0
    losses: Losses = field(default_factory=Losses)
    peaks: tuple[tuple[float, int], ...] = ()
    news: Mapping[str, News] = field(default_factory=dict)
    answered: Mapping[str, Backlog] = field(default_factory=dict)
    speeds: Speeds = field(default_factory=Speeds)
    encoded: tuple[float, float] = (0.0, 0.0)
    smooth: tuple[float, ...] = ()
    decided_at: float = 0.0


def decide(rules: Rules, seen: Observation, state: State) -> tuple[int, State]:
    """How many replicas there should be from now on, between `least` and `most`."""
    state = _noticed(rules, seen, state)
    needed = min(_needed(rules, seen, state), seen.most)
    state = _remembered(rules, seen, state, needed)
    if state.short_since is not None and seen.now - state.short_since >= rules.upscale_delay_s:
        target = needed
    elif seen.least == 0 and _known_at(seen, state) - state.active_at >= rules.zero_delay_s:
        target = 0
    else:
        target = min(seen.target, _most_needed(state))
    target = max(seen.least, min(target, seen.most))
    return target, _moved(seen, state, target)


def _noticed(rules: Rules, seen: Observation, state: State) -> State:
    """What has happened since the last decision, whoever made it happen."""
    losses = _losses(rules, seen, state)
    state = replace(_moved(seen, state, seen.target), losses=losses)
    heard = seen.heard
    starting = _starting(rules, seen, state)
    active = seen.held or starting or any(_worked(state, *each) for each in heard.items())
    return replace(
        _measured(state, heard),
        news=_news(seen, state),
        settled_at=state.settled_at if state.news.keys() >= heard.keys() else seen.now,
        active_at=seen.now if active else state.active_at,
        answered=_answered(rules, seen, state),
    )


def _losses(rules: Rules, seen: Observation, state: State) -> Losses:
    """Each loss is given the start timeout, except that of an unproven replica: if each restart of
    a replica that fails repeatedly were given it, idle replicas would never be released.

    A replica is unproven for the longest delay after its first report, if that came within the
    start timeout and the longest delay after a loss. In any other cycle of failures and restarts
    of one replica there is the longest delay during which nothing counts as starting. Replicas
    requested for more load cannot be told from replacements.
    """
    known, longest_s = state.losses, _longest_delay_s(rules)
    unproven = {name: at for name, at in known.unproven.items() if seen.now - at <= longest_s}
    lost = _lost(seen, state)
    began_at = seen.now if lost - unproven.keys() else known.began_at
    last_at = seen.now if lost else known.last_at
    if seen.now - last_at <= rules.start_timeout_s + longest_s:
        new = dict.fromkeys(seen.heard.keys() - state.news.keys(), seen.now)
        unproven = {**new, **unproven}
    unproven = {name: at for name, at in unproven.items() if name in seen.running}
    return Losses(began_at, last_at, unproven)


def _lost(seen: Observation, state: State) -> set[str]:
    """Replicas that reported at the last decision and are gone, though it did not stop them."""
    gone = state.news.keys() - seen.running.keys()
    stopped = max(0, len(state.news) - state.target)
    return gone if _missing(seen) and len(gone) > stopped else set()


def _longest_delay_s(rules: Rules) -> float:
    return max(rules.downscale_delay_s, rules.zero_delay_s, rules.start_timeout_s)


def _news(seen: Observation, state: State) -> dict[str, News]:
    new = {name: News(history[-1].at, seen.now) for name, history in seen.heard.items()}
    known = state.news
    return {
        name: known[name] if name in known and known[name].at == each.at else each
        for name, each in new.items()
    }


def _worked(state: State, name: str, history: History) -> bool:
    """Whether the replica tells of work that it has not told of before."""
    at = active_at(history)
    return at is not None and (name not in state.news or at > state.news[name].at)


def _known_at(seen: Observation, state: State) -> float:
    """Until when all is known."""
    return min((news.seen_at for news in state.news.values()), default=seen.now)


def _moved(seen: Observation, state: State, target: int) -> State:
    """Another number of replicas is given its time."""
    if state.peaks and target == state.target:
        return state
    raised = not state.peaks or target > state.target
    return replace(
        state,
        target=target,
        short_since=None,
        peaks=((seen.now, target),),
        active_at=state.active_at if state.peaks else seen.now,
        raised_at=seen.now if raised else state.raised_at,
    )


def _measured(state: State, heard: Mapping[str, History]) -> State:
    """Speeds: of prompts as replicas measure it, of images by what they have encoded."""
    known = [h[-1].tokens_per_s for h in heard.values() if h[-1].tokens_per_s]
    tokens_per_s = sum(known) / len(known) if known else state.speeds.tokens_per_s
    images, seconds = state.encoded
    for name, history in heard.items():
        more, took = encoding(history, state.news[name].at if name in state.news else 0.0)
        kept = math.exp(-took / ENCODING_MEMORY_S)
        images, seconds = kept * images + more, kept * seconds + took
    images_per_s = max(images, 1.0) / seconds if seconds else 0.0
    return replace(
        state,
        speeds=Speeds(tokens_per_s, images_per_s),
        encoded=(images, seconds),
    )


def _answered(rules: Rules, seen: Observation, state: State) -> dict[str, Backlog]:
    """Whatever waits while replicas start is what they are started for, unless they fail to."""
    waits = {name: backlog(history[-1]) for name, history in seen.heard.items()}
    if _starting(rules, seen, state):
        return waits
    known = {} if _missing(seen) else state.answered
    return {name: known.get(name, Backlog()).least(each) for name, each in waits.items()}


def _missing(seen: Observation) -> bool:
    """Whether a requested or running replica has not reported yet."""
    return len(seen.heard) < max(seen.target, len(seen.running))


def _starting(rules: Rules, seen: Observation, state: State) -> bool:
    """Whether a missing replica is expected soon: the time since it was requested, or lost, is
    within the start timeout.

    After that it neither counts as capacity nor delays the release of others. Serve does not tell
    the policy which replicas wait for a place and which load their model, and stops those that do
    not run yet before all others, so both are released together once the load no longer needs them.
    """
    since = max(state.raised_at, state.losses.began_at)
    return _missing(seen) and seen.now - since < rules.start_timeout_s


def _needed(rules: Rules, seen: Observation, state: State) -> int:
    """How many replicas it takes to meet the targets, where there are too few; else fewer or 0.

    Nobody needs more replicas than there are requests.
    """
    asked = _asked_while_starting if _starting(rules, seen, state) else _asked
    return min(_whole(asked(rules, seen, state)), _requests(seen))


def _asked(rules: Rules, seen: Observation, state: State) -> float:
    """What waits says that there are too few; how many there must be, that and what arrives."""
    targets, speeds, heard = rules.targets, state.speeds, seen.heard
    now = _by_signal([pressure(each[-1], speeds, targets) for each in heard.values()])
    new = _by_signal(
        [
            pressure(each[-1], speeds, targets, without=state.answered[name])
            for name, each in heard.items()
        ]
    )
    asked = [
        # A replica that still has to do with what others were started for is a full one.
        sum(max(min(1.0, all_of_it), new_of_it) for all_of_it, new_of_it in zip(*each, strict=True))
        for each in zip(now, new, strict=True)
        if _crowded(each[0])
    ]
    if _crowded(now[PROMPTS]):
        asked.append(_arriving(rules, seen, state))
    if seen.now - state.settled_at > TTFT_MEMORY_S + (targets.ttft_s or 0.0):
        asked.append(late(heard, targets))
    return max(asked, default=0.0)


def _asked_while_starting(rules: Rules, seen: Observation, state: State) -> float:
    """What waits is waited for already; only if still more arrives, still more are needed."""
    now = [pressure(h[-1], state.speeds, rules.targets).prompts for h in seen.heard.values()]
    return _arriving(rules, seen, state) if _crowded(now) else 0.0


def _arriving(rules: Rules, seen: Observation, state: State) -> float:
    return sum(arriving(history, state.speeds, rules.targets) for history in seen.heard.values())


def _crowded(pressures: Sequence[float]) -> bool:
    """Whether nearly all are full: a newcomer goes to the emptiest."""
    return sum(min(1.0, each) for each in pressures) > CROWDED * len(pressures)


def _remembered(rules: Rules, seen: Observation, state: State, needed: int) -> State:
    """Since when there are too few; and how many were needed lately, with some room on each."""
    short_since = state.short_since if state.short_since is not None else seen.now
    state = replace(state, short_since=short_since if needed > seen.target else None)
    state = _smoothed(rules, seen, state)
    roomy = min(_whole(max(state.smooth) / rules.slack), _requests(seen))
    roomy = max(roomy, needed, 1)
    if _starting(rules, seen, state) or seen.now - _known_at(seen, state) > rules.silent_s:
        roomy = max(roomy, seen.target)
    after = seen.now - rules.downscale_delay_s
    peaks = [(at, count) for at, count in state.peaks if at > after and count > roomy]
    return replace(state, peaks=(*peaks, (seen.now, roomy)))


def _most_needed(state: State) -> int:
    return state.peaks[0][1]


def _smoothed(rules: Rules, seen: Observation, state: State) -> State:
    """The pressure by each signal over all replicas, and by what arrives, averaged."""
    now = [pressure(h[-1], state.speeds, rules.targets) for h in seen.heard.values()]
    total = (*map(sum, _by_signal(now)), _arriving(rules, seen, state))
    kept = math.exp(min(0.0, state.decided_at - seen.now) / rules.smoothing_s)
    before = state.smooth or total
    smooth = (new + kept * (old - new) for old, new in zip(before, total, strict=True))
    return replace(state, smooth=tuple(smooth), decided_at=seen.now)


def _by_signal(pressures: Sequence[Pressure]) -> list[list[float]]:
    """Of each signal, what it is on each of the replicas."""
    return [
        [each.prompts for each in pressures],
        [each.images for each in pressures],
        [each.sequences for each in pressures],
        [each.memory for each in pressures],
        [each.room for each in pressures],
    ]


def _requests(seen: Observation) -> int:
    """The most that were there at once lately."""
    most = (max(report.requests for report in history) for history in seen.heard.values())
    return math.ceil(sum(most) + seen.held)


def _whole(replicas: float) -> int:
    return math.ceil(replicas - 1e-9)
