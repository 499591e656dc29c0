"""The autoscaling metrics of an on-demand process, which has an engine for each loaded model.

Free capacity of one model does not help requests for another. So the metrics are chosen so that
each load share is that of the most loaded model; a sum would hide a full model behind idle ones.
"""

import time
from collections.abc import Callable, Iterable

from runtime.engine.engine_statistics import EngineStatistics
from serve_app.autoscaling.load_metrics import kv_growth

# A request that was refused for lack of memory is likely to be retried; it counts for this long.
REFUSED_S = 10.0


class PoolLoad:
    """Keeps the totals of unloaded models, and the models that were refused recently."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._past_tokens = self._past_steps = 0
        self._refused: dict[str, tuple[float, float]] = {}

    def note_unloaded(self, statistics: EngineStatistics) -> None:
        """Totals of an unloaded model stay part of the process's totals."""
        self._past_tokens += statistics.computed_tokens_total
        self._past_steps += statistics.steps_total

    def note_refused(self, model: str, share: float) -> None:
        """A model was refused for lack of memory; it needs this share of the process's memory."""
        self._refused[model] = self._clock(), share

    def metrics(
        self, engines: Iterable[EngineStatistics], *, held_requests: int, used_share: float
    ) -> dict[str, float]:
        """Values of `serve_app.autoscaling.load_metrics.ScalingMetrics` except `operations`.

        `engines`: of the loaded models. `held_requests`: requests for models that are being loaded.
        `used_share`: the share of memory that models with requests take.
        """
        each = list(engines)
        refused = self._refused_shares()
        return {
            **_sequences(each, held_requests + len(refused)),
            **_prompts(each),
            "work_total": float(
                sum((one.computed_tokens_total for one in each), self._past_tokens)
            ),
            "steps_total": float(sum((one.steps_total for one in each), self._past_steps)),
            # A refusal means that no memory is free, even if `used_share` is lower.
            "model_memory": max(used_share, 1.0) + sum(refused) if refused else used_share,
        }

    def _refused_shares(self) -> list[float]:
        after = self._clock() - REFUSED_S
        self._refused = {name: each for name, each in self._refused.items() if each[0] > after}
        return [share for _, share in self._refused.values()]


def _sequences(each: list[EngineStatistics], held_requests: int) -> dict[str, float]:
    """Slots and KV occupancy whose load shares equal those of the most loaded model."""
    running = sum(one.running for one in each)
    waiting = sum(one.waiting for one in each) + held_requests
    taken = max(((one.running + one.waiting) / one.slots for one in each if one.slots), default=0.0)
    projected = max(
        (one.kv_occupancy * kv_growth(one.running, one.running + one.waiting) for one in each),
        default=0.0,
    )
    return {
        "running": float(running),
        "waiting": float(waiting),
        "slots": (running + waiting) / taken if taken else 0.0,
        "kv_occupancy": projected / kv_growth(running, running + waiting),
    }


def _prompts(each: list[EngineStatistics]) -> dict[str, float]:
    """A speed at which the whole queue takes as long as that of the slowest model."""
    known = [(one.queued_tokens, one.tokens_per_s) for one in each if one.tokens_per_s]
    longest_s = max((tokens / speed for tokens, speed in known), default=0.0)
    queued = sum(one.queued_tokens for one in each)
    speed = sum(speed for _, speed in known) / len(known) if known else 0.0
    return {
        "queued_work": float(queued),
        "work_per_s": queued / longest_s if longest_s else speed,
    }
