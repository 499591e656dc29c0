"""Reports of replicas to autoscaling, and the shares of a replica's capacity that they express.

Standard library only: Serve's controller runs this module without the rest of the project.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ScalingMetrics:
    """One report of a replica, taken at `at` seconds of the replica's clock; 0 means unknown.

    Work is counted in prompt tokens by model replicas and in images by vision encoders.
    `work_per_s` is the measured speed; without it, the speed follows from `work_total`.
    `kv_occupancy` is the used share of the KV cache's pages. `model_memory` is reported by
    on-demand processes: the share of their memory that models in use take, plus the shares of
    models that were recently refused for lack of memory, and `operations`, the pulls, pushes,
    creations and uploads that run in them. Totals count from the replica's start.
    """

    at: float
    running: float = 0.0
    waiting: float = 0.0
    slots: float = 0.0
    kv_occupancy: float = 0.0
    model_memory: float = 0.0
    operations: float = 0.0
    queued_work: float = 0.0
    work_per_s: float = 0.0
    work_total: float = 0.0
    steps_total: float = 0.0

    @property
    def requests(self) -> float:
        return self.running + self.waiting


METRIC_NAMES = tuple(each.name for each in fields(ScalingMetrics) if each.name != "at")
History = Sequence[ScalingMetrics]  # reports of one replica, oldest first, at least one


@dataclass(frozen=True, slots=True)
class ScalingTargets:
    """The load at which a replica is full.

    `queue_s`: the time that queued work takes. `sequence_occupancy`: the share of slots that
    running and waiting requests take. `kv_occupancy`: the used share of the KV cache's pages.
    """

    queue_s: float = 5.0
    sequence_occupancy: float = 0.9
    kv_occupancy: float = 0.9


class LoadShares(NamedTuple):
    """The load of one replica for each signal, as a share of the target: at 1.0 it is full."""

    queue: float = 0.0
    sequences: float = 0.0
    memory: float = 0.0


def load_shares(
    metrics: ScalingMetrics, targets: ScalingTargets, *, work_per_s: float
) -> LoadShares:
    """`work_per_s`: the replica's speed, 0 if unknown; then its queue is not counted."""
    kv_occupancy = metrics.kv_occupancy * kv_growth(metrics.running, metrics.requests)
    return LoadShares(
        queue=_share(metrics.queued_work, work_per_s * targets.queue_s),
        sequences=_share(metrics.requests, metrics.slots * targets.sequence_occupancy),
        memory=max(kv_occupancy / targets.kv_occupancy, metrics.model_memory),
    )


def kv_growth(running: float, requests: float) -> float:
    """The factor by which KV usage grows once every queued request is running."""
    return requests / running if running else 1.0


def throughput_share(history: History, *, work_per_s: float) -> float:
    """The work done during the history, as a share of what the replica's speed allows.

    When load and capacity are in balance, queues are short, so queues alone would suggest that
    fewer replicas suffice.
    """
    first, last = history[0], history[-1]
    return _share(last.work_total - first.work_total, work_per_s * (last.at - first.at))


def measured_speed(history: History) -> float:
    """Work per second: as reported, else the work done between reports with queued work.

    0 if no work was queued. Work that takes longer than the history counts as one unit.
    """
    if history[-1].work_per_s:
        return history[-1].work_per_s
    done = seconds = 0.0
    for before, after in pairwise(history):
        if before.queued_work and after.queued_work:
            done += after.work_total - before.work_total
            seconds += after.at - before.at
    return max(done, 1.0) / seconds if seconds else 0.0


def _share(part: float, whole: float) -> float:
    return max(0.0, part) / whole if whole > 0 else 0.0
