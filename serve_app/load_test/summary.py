"""Statistics of the samples of a load test."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from serve_app.load_test.measuring import Sample


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles, in the unit of the values; percentiles are interpolated linearly."""

    mean: float
    p50: float
    p90: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """Rates are per second from the first start to the last end. `spreads`: distributions in
    seconds over complete answers, by the names of `MEASURES`; measures without values are
    missing."""

    requests: int
    complete: int
    seconds: float
    requests_per_s: float
    prompt_tokens_per_s: float
    answer_tokens_per_s: float
    prompt_tokens: int
    answer_tokens: int
    spreads: Mapping[str, Spread]
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
    }
)


def values_of(samples: Sequence[Sample], measure: str) -> list[float]:
    """The values of the complete answers, in seconds."""
    read = MEASURES[measure]
    return [value for sample in samples if sample.error is None for value in read(sample)]


def summarise(samples: Sequence[Sample]) -> LoadSummary:
    """The statistics of at least one sample."""
    begun = min(sample.started_s for sample in samples)
    seconds = max(sample.started_s + sample.latency_s for sample in samples) - begun
    complete = sum(sample.error is None for sample in samples)
    prompt = sum(sample.prompt_tokens for sample in samples)
    answer = sum(sample.answer_tokens for sample in samples)
    values = {measure: values_of(samples, measure) for measure in MEASURES}

    def rate(count: int) -> float:
        return count / seconds if seconds else 0.0

    return LoadSummary(
        requests=len(samples),
        complete=complete,
        seconds=seconds,
        requests_per_s=rate(complete),
        prompt_tokens_per_s=rate(prompt),
        answer_tokens_per_s=rate(answer),
        prompt_tokens=prompt,
        answer_tokens=answer,
        spreads={measure: _spread(found) for measure, found in values.items() if found},
        errors=dict(Counter(s.error for s in samples if s.error is not None).most_common()),
    )


def _spread(values: Sequence[float]) -> Spread:
    p50, p90, p99 = (float(p) for p in np.percentile(values, (50, 90, 99)))
    return Spread(float(np.mean(values)), p50, p90, p99, max(values))
