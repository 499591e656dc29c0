"""Statistics of the samples of a load test."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from serve_app.load_test.measuring import Sample


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles, in the unit of the values; percentiles are interpolated linearly."""

    mean: float
    p50: float
    p90: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """Rates are per second from the first start to the last end, and tokens are those of complete
    answers. `due_per_s`: the rate of the schedule up to its last request, None without one.
    `spreads`: distributions in seconds over complete answers, by the names of `MEASURES`; measures
    without values are missing."""

    requests: int
    complete: int
    seconds: float
    due_per_s: float | None
    requests_per_s: float
    prompt_tokens_per_s: float
    answer_tokens_per_s: float
    prompt_tokens: int
    answer_tokens: int
    spreads: Mapping[str, Distribution]
    errors: Mapping[str, int]


def _per_token(sample: Sample) -> list[float]:
    """Seconds per token after the first."""
    if sample.answer_tokens < 2 or not sample.gaps_s:
        return []
    return [sum(sample.gaps_s) / (sample.answer_tokens - 1)]


MEASURES: Mapping[str, Callable[[Sample], Sequence[float]]] = MappingProxyType(
    {
        "first token": lambda sample: [] if sample.first_s is None else [sample.first_s],
        "between parts": lambda sample: sample.gaps_s,
        "per token": _per_token,
        "latency": lambda sample: [sample.latency_s],
        "late start": lambda s: [] if s.due_s is None else [max(0.0, s.started_s - s.due_s)],
    }
)


def values_of(samples: Sequence[Sample], measure: str) -> list[float]:
    """The values of the complete answers, in seconds."""
    read = MEASURES[measure]
    return [value for sample in _complete(samples) for value in read(sample)]


def _complete(samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.error is None]


def summarise(samples: Sequence[Sample]) -> LoadSummary:
    """The statistics of at least one sample."""
    begun = min(sample.started_s for sample in samples)
    seconds = max(sample.started_s + sample.latency_s for sample in samples) - begun
    complete = _complete(samples)
    prompt = sum(sample.prompt_tokens for sample in complete)
    answer = sum(sample.answer_tokens for sample in complete)
    due = [sample.due_s for sample in samples if sample.due_s is not None]
    last_due_s = max(due, default=0.0)
    values = {measure: values_of(samples, measure) for measure in MEASURES}

    def rate(count: int) -> float:
        return count / seconds if seconds else 0.0

    return LoadSummary(
        requests=len(samples),
        complete=len(complete),
        seconds=seconds,
        due_per_s=len(due) / last_due_s if last_due_s else None,
        requests_per_s=rate(len(complete)),
        prompt_tokens_per_s=rate(prompt),
        answer_tokens_per_s=rate(answer),
        prompt_tokens=prompt,
        answer_tokens=answer,
        spreads={measure: _distribution(found) for measure, found in values.items() if found},
        errors=dict(Counter(s.error for s in samples if s.error is not None).most_common()),
    )


def _distribution(values: Sequence[float]) -> Distribution:
    p50, p90, p99 = (float(p) for p in np.percentile(values, (50, 90, 99)))
    return Distribution(float(np.mean(values)), p50, p90, p99, max(values))
