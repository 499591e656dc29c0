"""How many replicas a number of ongoing requests asks for."""

from types import SimpleNamespace

import pytest

from runtime.engine import EngineStatistics
from serve_app.autoscaling import autoscaling_config, autoscaling_stats, by_ongoing_requests
from serve_app.settings import AutoscalingSettings


def context(reports, target=8.0):
    metrics = {
        name: {f"r{i}": report[name] for i, report in enumerate(reports)}
        for name in (reports[0] if reports else {})
    }
    config = autoscaling_config(AutoscalingSettings(target_ongoing_requests=target))
    return SimpleNamespace(aggregated_metrics=metrics, config=config)


@pytest.mark.parametrize(
    ("replicas", "wanted"),
    [([], 0), ([(0, 0)], 0), ([(8, 0)], 1), ([(8, 8)], 2), ([(8, 4), (8, 0)], 2.5)],
)
def test_requests_that_run_or_wait_count_alike(replicas, wanted):
    reports = [autoscaling_stats(EngineStatistics(running=r, waiting=w)) for r, w in replicas]
    assert by_ongoing_requests(context(reports))[0] == wanted
