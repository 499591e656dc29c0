"""A meter that keeps what it is given."""

from collections import defaultdict

from serve_app.telemetry.metrics import Metric


class RecordingMeter:
    def __init__(self) -> None:
        self.totals: defaultdict[tuple[str, ...], float] = defaultdict(float)
        self.gauges: dict[tuple[str, ...], float] = {}
        self.observed: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)

    def add(self, metric: Metric, amount: float, *labels: str) -> None:
        assert len(labels) == len(metric.labels)
        if amount:
            self.totals[metric.name, *labels] += amount

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        assert len(labels) == len(metric.labels)
        self.gauges[metric.name, *labels] = value

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        assert len(labels) == len(metric.labels)
        self.observed[metric.name, *labels].append(value)
