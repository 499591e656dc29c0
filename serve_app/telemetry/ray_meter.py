"""Records metrics with Ray, whose agent on each node exports them to Prometheus."""

from functools import cache

from ray.util.metrics import Counter, Gauge, Histogram

from serve_app.telemetry.meter import LabelValues
from serve_app.telemetry.metrics import Metric


class RayMeter:
    """A Meter for a process of a Ray cluster; a call takes some microseconds."""

    def __init__(self) -> None:
        self._values = LabelValues()
        # Ray's object of each metric, created once.
        self._counter = cache(lambda each: Counter(each.name, each.description, each.labels))
        self._gauge = cache(lambda each: Gauge(each.name, each.description, each.labels))
        self._histogram = cache(
            lambda each: Histogram(each.name, each.description, list(each.buckets), each.labels)
        )

    def add(self, metric: Metric, amount: float, *labels: str) -> None:
        if amount > 0:
            self._counter(metric).inc(amount, self._values.named(metric, labels))

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        self._gauge(metric).set(value, self._values.named(metric, labels))

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        self._histogram(metric).observe(value, self._values.named(metric, labels))
