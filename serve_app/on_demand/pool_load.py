"""What a process with several models tells autoscaling, in the measures that one engine has.

Free places of one model help nobody who asks for another. So each measure is told as it is for the
model that bears most by it; a sum would hide one that is full behind others that are idle.
"""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from runtime.engine.engine import EngineStatistics
from serve_app.autoscaling.load_metrics import growth

# A request that was refused for want of room is likely to come again; so long it counts.
LACKING_S = 10.0
# First tokens of longer ago tell nothing of the waits now.
RECENT_S = 30.0
TOTALS = (
    "computed_tokens_total",
    "encoded_images_total",
    "first_tokens_total",
    "steps_total",
)

Model = TypeVar("Model")


class PoolLoad:
    """Remembers what has been done by models that are gone, and what was refused lately."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._past = dict.fromkeys(TOTALS, 0)
        self._refused: dict[str, tuple[float, float]] = {}
        self._firsts: dict[object, tuple[int, float]] = {}  # how many, and since when so many

    def note_gone(self, statistics: EngineStatistics) -> None:
        """A model is unloaded; what it has done stays done."""
        for name, count in _totals(statistics).items():
            self._past[name] += count

    def note_refused(self, model: str, share: float) -> None:
        """There was no room for it; it needs so much of what the process has."""
        self._refused[model] = self._clock(), share

    def read(
        self,
        engines: Mapping[Model, EngineStatistics],
        *,
        held: int,
        used: float,
    ) -> dict[str, float]:
        """`engines`: of the loaded models. `held`: requests whose model is on its way. `used`: of
        the room, by models that somebody asks. See serve_app.autoscaling.load_metrics.Report."""
        lacking = self._lacking()
        each = list(engines.values())
        totals = [self._past, *map(_totals, each)]
        return {
            **_places(each, held + len(lacking)),
            **_prompts(each),
            **self._waits(engines),
            **{name: float(sum(total[name] for total in totals)) for name in TOTALS},
            "queued_images": float(sum(one.images_waiting for one in each)),
            # Where one was refused there is no room, whatever it is that takes it.
            "room_used": max(used, 1.0) if lacking else used,
            "room_lacking": sum(lacking),
        }

    def _lacking(self) -> list[float]:
        """Of each model that was refused lately."""
        after = self._clock() - LACKING_S
        self._refused = {name: told for name, told in self._refused.items() if told[0] > after}
        return [share for _, share in self._refused.values()]

    def _waits(self, engines: Mapping[Model, EngineStatistics]) -> dict[str, float]:
        """Of the model whose requests wait longest for their turn: that is what room shortens."""
        now, before = self._clock(), self._firsts
        self._firsts = {}
        for model, one in engines.items():
            count, since = before.get(model, (0, now))
            self._firsts[model] = one.first_tokens_total, since
            if count != one.first_tokens_total:
                self._firsts[model] = one.first_tokens_total, now
        recent = [one for model, one in engines.items() if now - self._firsts[model][1] <= RECENT_S]
        waits = [(one.ttft_queue_s or 0.0, one.ttft_s or 0.0) for one in recent]
        queue_s, ttft_s = max(waits, default=(0.0, 0.0))
        return {"ttft_s": ttft_s, "ttft_queue_s": queue_s}


def _places(each: list[EngineStatistics], held: int) -> dict[str, float]:
    """Sequences and pages: so many places that the share taken is that of the fullest model."""
    running = sum(one.running for one in each)
    waiting = sum(one.waiting for one in each) + held
    taken = max(((one.running + one.waiting) / one.slots for one in each if one.slots), default=0.0)
    wanted = max(
        (one.kv_occupancy * growth(one.running, one.running + one.waiting) for one in each),
        default=0.0,
    )
    return {
        "running": float(running),
        "waiting": float(waiting),
        "slots": (running + waiting) / taken if taken else 0.0,
        "kv_occupancy": wanted / growth(running, running + waiting),
    }


def _prompts(each: list[EngineStatistics]) -> dict[str, float]:
    """Such a speed that the whole queue takes as long as that of the model that takes longest."""
    known = [(one.queued_tokens, one.tokens_per_s) for one in each if one.tokens_per_s]
    longest_s = max((tokens / speed for tokens, speed in known), default=0.0)
    queued = sum(one.queued_tokens for one in each)
    speed = sum(speed for _, speed in known) / len(known) if known else 0.0
    return {
        "queued_tokens": float(queued),
        "tokens_per_s": queued / longest_s if longest_s else speed,
    }


def _totals(statistics: EngineStatistics) -> dict[str, int]:
    return {
        "computed_tokens_total": statistics.computed_tokens_total,
        "encoded_images_total": statistics.images_encoded_total,
        "first_tokens_total": statistics.first_tokens_total,
        "steps_total": statistics.steps_total,
    }
