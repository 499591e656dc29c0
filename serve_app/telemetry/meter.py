"""The interface for recording values of metrics."""

from typing import Protocol

from serve_app.telemetry.metrics import Metric

# Maximum number of values of one label that a process exports; users may pull any number of models.
MOST_LABEL_VALUES = 256
OTHER = "other"


class Meter(Protocol):
    """Records values. `labels`: the values of the metric's labels, in their order."""

    def add(self, metric: Metric, amount: float, *labels: str) -> None:
        """Increases a counter; does nothing for 0."""

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Sets a gauge."""

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Adds a value to a histogram."""


class NoMeter:
    """Records nothing."""

    def add(self, metric: Metric, amount: float, *labels: str) -> None: ...

    def set(self, metric: Metric, value: float, *labels: str) -> None: ...

    def observe(self, metric: Metric, value: float, *labels: str) -> None: ...


class LabelValues:
    """Label values by name. Values beyond the first `most` of a label become `OTHER`."""

    def __init__(self, most: int = MOST_LABEL_VALUES) -> None:
        self._most = most
        self._known: dict[str, set[str]] = {}

    def named(self, metric: Metric, labels: tuple[str, ...]) -> dict[str, str]:
        return {
            name: self._bounded(name, value)
            for name, value in zip(metric.labels, labels, strict=True)
        }

    def _bounded(self, name: str, value: str) -> str:
        known = self._known.setdefault(name, set())
        if value not in known:
            if len(known) >= self._most:
                return OTHER
            known.add(value)
        return value
