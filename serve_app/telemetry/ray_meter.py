"""Records metrics with Ray, whose agent on each node exports them to Prometheus."""

from ray.util.metrics import Counter, Gauge, Histogram

from serve_app.telemetry.meter import LabelValues
from serve_app.telemetry.metrics import Metric


class RayMeter:
    """A Meter for a process of a Ray cluster; a call takes some microseconds."""

    def __init__(self) -> None:
        self._values = LabelValues()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}

    def add(self, metric: Metric, amount: float, *labels: str) -> None:
        if amount <= 0:
            return
        counter = self._counters.get(metric.name)
        if counter is None:
            counter = Counter(metric.name, metric.description, metric.labels)
            self._counters[metric.name] = counter
        counter.inc(amount, self._values.named(metric, labels))

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        gauge = self._gauges.get(metric.name)
        if gauge is None:
            gauge = Gauge(metric.name, metric.description, metric.labels)
            self._gauges[metric.name] = gauge
        gauge.set(value, self._values.named(metric, labels))

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        histogram = self._histograms.get(metric.name)
        if histogram is None:
            histogram = Histogram(
                metric.name, metric.description, list(metric.buckets), metric.labels
            )
            self._histograms[metric.name] = histogram
        histogram.observe(value, self._values.named(metric, labels))
