"""Publishes the statistics of engines and vision encoders as metrics, at intervals."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from serve_app.telemetry.meter import MOST_LABEL_VALUES, Meter
from serve_app.telemetry.metrics import Kind, Metric

PUBLISH_S = 2.0


class StatisticsPublisher:
    """Publishes fields of statistics as metrics; of totals, the increase since the last call.

    `replica`: this process. While the statistics of a name are missing, for example because its
    model was unloaded, its gauges are 0; when they return, totals start from 0. Gauges are set each
    time, because `exposition` takes a process without gauges for one that has ended; of missing
    names only of those used last, as many as have a label of their own.
    """

    def __init__(self, meter: Meter, fields: Mapping[str, Metric], replica: str) -> None:
        self._meter = meter
        self._fields = fields
        self._replica = replica
        # Totals by name and field, the names that were used last at the end.
        self._published: dict[str, dict[str, float]] = {}

    def publish(self, statistics: Mapping[str, Any]) -> None:
        """`statistics`: statistics by the name of a model or encoder."""
        for name in self._published.keys() - statistics.keys():
            self._published[name] = {}
            self._set_gauges(name, None)
        for name, values in statistics.items():
            self._set_gauges(name, values)
            self._add_totals(name, values)
        missing = [name for name in self._published if name not in statistics]
        for name in missing[: max(0, len(self._published) - MOST_LABEL_VALUES)]:
            del self._published[name]

    def _set_gauges(self, name: str, values: Any) -> None:
        for field, metric in self._fields.items():
            if metric.kind is Kind.GAUGE:
                value = None if values is None else getattr(values, field)
                self._meter.set(metric, float(value or 0), name, self._replica)

    def _add_totals(self, name: str, values: Any) -> None:
        before = self._published.pop(name, {})
        self._published[name] = before
        for field, metric in self._fields.items():
            if metric.kind is Kind.COUNTER:
                total = getattr(values, field)
                # A total that is smaller than before belongs to a new engine of the model.
                known = before.get(field, 0) if before.get(field, 0) <= total else 0
                self._meter.add(metric, total - known, name, self._replica)
                before[field] = total


async def publish_regularly(
    publisher: StatisticsPublisher, statistics: Callable[[], Mapping[str, Any]]
) -> None:
    while True:
        publisher.publish(statistics())
        await asyncio.sleep(PUBLISH_S)
