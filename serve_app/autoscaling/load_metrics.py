"""How much of what a replica can bear it bears: 1.0 where it just meets the targets.

Plain numbers and the standard library only. The sum over all replicas is how many of them the load
takes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

History = Sequence["Report"]  # of one replica, the oldest first, with one report or more


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica says of itself, `at` in seconds; 0 where there is nothing to say.

    `queued_images` are being encoded or wait for it. `kv_occupancy`: of pages. `room_used`: of what
    a process has for models on demand, by those that are at work; `room_lacking`: by those that
    were refused lately, since others had it. `ttft_s` and `ttft_queue_s`: see `throughput`.
    Totals are since the replica's start.
    """

    at: float
    running: float = 0.0
    waiting: float = 0.0
    slots: float = 0.0
    kv_occupancy: float = 0.0
    room_used: float = 0.0
    room_lacking: float = 0.0
    queued_tokens: float = 0.0
    tokens_per_s: float = 0.0
    computed_tokens_total: float = 0.0
    queued_images: float = 0.0
    encoded_images_total: float = 0.0
    ttft_s: float = 0.0
    ttft_queue_s: float = 0.0
    first_tokens_total: float = 0.0
    steps_total: float = 0.0

    @property
    def requests(self) -> float:
        return self.running + self.waiting + self.queued_images


MEASURES = tuple(each.name for each in fields(Report) if each.name != "at")


@dataclass(frozen=True, slots=True)
class Targets:
    """What a replica should bear.

    `load`: of its speed, what may be taken by prompts that arrive.
    """

    queue_s: float = 5.0
    ttft_s: float | None = 10.0
    sequence_occupancy: float = 0.9
    kv_occupancy: float = 0.9
    load: float = 0.8


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of one replica, 0 where unknown."""

    tokens_per_s: float = 0.0
    images_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits on a replica, and does so until that replica gets to it."""

    tokens: float = 0.0
    images: float = 0.0
    requests: float = 0.0

    def least(self, other: "Backlog") -> "Backlog":
        return Backlog(
            min(self.tokens, other.tokens),
            min(self.images, other.images),
            min(self.requests, other.requests),
        )


@dataclass(frozen=True, slots=True)
class Pressure:
    """What a request that arrives would have to wait for: prompts and images that are queued,
    places for sequences, pages of cache, room for its model."""

    prompts: float = 0.0
    images: float = 0.0
    sequences: float = 0.0
    memory: float = 0.0
    room: float = 0.0


def backlog(report: Report) -> Backlog:
    return Backlog(report.queued_tokens, report.queued_images, report.waiting)


def pressure(
    report: Report, speeds: Speeds, targets: Targets, *, without: Backlog | None = None
) -> Pressure:
    """`without`: what of its backlog is not to count."""
    less = without or Backlog()
    tokens_per_s = report.tokens_per_s or speeds.tokens_per_s
    requests = report.running + report.waiting - less.requests
    return Pressure(
        prompts=_share(report.queued_tokens - less.tokens, tokens_per_s * targets.queue_s),
        images=_share(report.queued_images - less.images, speeds.images_per_s * targets.queue_s),
        sequences=_share(requests, report.slots * targets.sequence_occupancy),
        memory=report.kv_occupancy * growth(report.running, requests) / targets.kv_occupancy,
        # Full of models that are used is no lack: the next one may never be asked for.
        room=report.room_used + report.room_lacking,
    )


def growth(running: float, requests: float) -> float:
    """Projected KV usage if every queued request were running."""
    return requests / running if running else 1.0


def arriving(history: History, speeds: Speeds, targets: Targets) -> float:
    """What takes a replica's speed: the prompts that came in the time of its history.

    A burst that came at once is given `queue_s`, like any queue.
    """
    first, last = history[0], history[-1]
    came = (last.computed_tokens_total + last.queued_tokens) - (
        first.computed_tokens_total + first.queued_tokens
    )
    tokens_per_s = last.tokens_per_s or speeds.tokens_per_s
    return _share(came, tokens_per_s * max(targets.queue_s, targets.load * (last.at - first.at)))


def late(histories: Mapping[str, History], targets: Targets) -> float:
    """How many replicas the times to the first token ask for, of as many as there are.

    More of them shorten the wait for the first step alone, which goes down as they go up. They are
    doubled at most: what is measured is as old as the wait that it tells of.
    """
    heard = [
        h[-1] for h in histories.values() if h[-1].first_tokens_total > h[0].first_tokens_total
    ]
    if not heard or targets.ttft_s is None:
        return 0.0
    ttft_s = sum(report.ttft_s for report in heard) / len(heard)
    queue_s = sum(report.ttft_queue_s for report in heard) / len(heard)
    excess_s = ttft_s - targets.ttft_s
    if excess_s <= 0 or queue_s < targets.ttft_s / 4:
        return 0.0
    return len(histories) * queue_s / max(queue_s - excess_s, queue_s / 2)


def encoding(history: History, since: float) -> tuple[float, float]:
    """Images encoded, and the seconds that took, while there were more, after `since`."""
    images = seconds = 0.0
    for before, after in pairwise(history):
        if before.at >= since and before.queued_images and after.queued_images:
            images += after.encoded_images_total - before.encoded_images_total
            seconds += after.at - before.at
    return images, seconds


def active_at(history: History) -> float | None:
    """When the replica was last seen with work, or to have had some since the report before."""
    if history[-1].requests:
        return history[-1].at
    for before, after in pairwise(reversed(history)):
        if before.steps_total != after.steps_total or after.requests:
            return before.at
    return None


def _share(part: float, whole: float) -> float:
    """0 where the whole is not known."""
    return max(0.0, part) / whole if whole > 0 else 0.0
