"""How many replicas a model gets: by the requests that its engines work on or let wait.

Serve counts the calls through its handles; tokens do not travel that way, so each replica reports
what its engine has at hand. Bounds and delays are applied by Serve.
"""

from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from runtime.engine import EngineStatistics
from serve_app.settings import AutoscalingSettings

ONGOING = "ongoing_requests"


def autoscaling_config(settings: AutoscalingSettings) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=settings.min_replicas,
        max_replicas=settings.max_replicas,
        target_ongoing_requests=settings.target_ongoing_requests,
        upscale_delay_s=settings.upscale_delay_s,
        downscale_delay_s=settings.downscale_delay_s,
        look_back_period_s=settings.look_back_period_s,
        policy=AutoscalingPolicy(policy_function=by_ongoing_requests),
    )


def autoscaling_stats(statistics: EngineStatistics) -> dict[str, float]:
    return {ONGOING: float(statistics.running + statistics.waiting)}


def by_ongoing_requests(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """As many replicas as share the ongoing requests at the configured number each."""
    assert context.config is not None
    metrics = context.aggregated_metrics or {}
    ongoing = sum(metrics.get(ONGOING, {}).values())
    return ongoing / context.config.get_target_ongoing_requests(), {}
