"""Serve's side of autoscaling: what replicas report, and a policy around `decision`.

Serve asks the policy some ten times a second and does at once what it says: all delays are ours,
Serve's are off. One thing Serve decides alone: where there is no replica, a request starts one.
"""

import dataclasses
import warnings
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from ray import cloudpickle
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from runtime.engine.engine import EngineStatistics
from serve_app.autoscaling import decision, load_metrics
from serve_app.config.sections import AutoscalingSettings

STATE = "caravan"
# How many reports the policy sees of each replica, and how often it looks between two of them.
REPORTS = 5
LOOKS = 4
# For so many intervals after a request has been answered Serve would still start a replica for it.
ECHO = REPORTS + 2
SMOOTHING_S = 30.0
SILENT_S = 1.0


def autoscaling_config(
    settings: AutoscalingSettings, *, start_timeout_s: float
) -> AutoscalingConfig:
    """`start_timeout_s`: see decision.Rules."""
    rules = scaling_rules(settings, start_timeout_s=start_timeout_s)
    with warnings.catch_warnings():
        # Serve 2.60 announces other ways to set the interval; it has none yet.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            metrics_interval_s=settings.metrics_interval_s,
            look_back_period_s=REPORTS * settings.metrics_interval_s,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            policy=_policy(rules, settings.metrics_interval_s / LOOKS),
        )


def scaling_rules(settings: AutoscalingSettings, *, start_timeout_s: float) -> decision.Rules:
    interval_s, zero_delay_s = settings.metrics_interval_s, settings.downscale_to_zero_delay_s
    if zero_delay_s is None:
        zero_delay_s = settings.downscale_delay_s
    return decision.Rules(
        load_metrics.Targets(
            queue_s=settings.target_queue_s,
            ttft_s=settings.target_ttft_s,
            sequence_occupancy=settings.target_sequence_occupancy,
            kv_occupancy=settings.target_kv_occupancy,
        ),
        upscale_delay_s=settings.upscale_delay_s,
        downscale_delay_s=settings.downscale_delay_s,
        zero_delay_s=max(zero_delay_s, ECHO * interval_s),
        smoothing_s=min(SMOOTHING_S, settings.downscale_delay_s / 5 + interval_s),
        silent_s=SILENT_S + 3 * interval_s,
        start_timeout_s=start_timeout_s,
    )


def engine_stats(statistics: EngineStatistics, *, encodes: bool = True) -> dict[str, float]:
    """What a model replica reports. `encodes`: its images, rather than a pool does."""
    return _stats(
        running=statistics.running,
        waiting=statistics.waiting,
        slots=statistics.slots,
        kv_occupancy=statistics.kv_occupancy,
        queued_tokens=statistics.queued_tokens,
        tokens_per_s=statistics.tokens_per_s,
        computed_tokens_total=statistics.computed_tokens_total,
        queued_images=statistics.images_waiting if encodes else 0,
        encoded_images_total=statistics.images_encoded_total if encodes else 0,
        ttft_s=statistics.ttft_s,
        ttft_queue_s=statistics.ttft_queue_s,
        first_tokens_total=statistics.first_tokens_total,
        steps_total=statistics.steps_total,
    )


def encoder_stats(
    *, images_waiting: int, images_encoded_total: int, images_known_total: int
) -> dict[str, float]:
    """What a vision encoder reports."""
    return _stats(
        queued_images=images_waiting,
        encoded_images_total=images_encoded_total,
        steps_total=images_encoded_total + images_known_total,
    )


class Autoscaler:
    """The policy of one deployment, in Serve's controller."""

    def __init__(self, rules: Mapping[str, Any], period_s: float) -> None:
        targets = load_metrics.Targets(**rules["targets"])
        self._rules = decision.Rules(**{**rules, "targets": targets})
        self._period_s = period_s

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        state = context.policy_state.get(STATE, decision.State())
        now, target = context.current_time, context.target_num_replicas
        assert now is not None
        if target == state.target and 0 <= now - state.decided_at < self._period_s:
            return target, context.policy_state
        before = target
        target, state = decision.decide(self._rules, seen(context), state)
        if target == 0 and before > 1:
            # Serve turns such a decision into 1, which must not look like a request for a replica.
            target, state = 1, dataclasses.replace(state, target=1)
        return target, {STATE: state}


def seen(context: AutoscalingContext) -> decision.Observation:
    """What Serve knows, as plain values."""
    assert context.current_time is not None
    metrics: Mapping[str, Mapping[Any, Any]] = context.raw_metrics or {}
    return decision.Observation(
        now=context.current_time,
        target=context.target_num_replicas,
        least=context.capacity_adjusted_min_replicas,
        most=context.capacity_adjusted_max_replicas,
        running={str(replica): _reports(metrics, replica) for replica in context.running_replicas},
        held=context.total_queued_requests,
    )


def _reports(
    metrics: Mapping[str, Mapping[Any, Any]], replica: Any
) -> tuple[load_metrics.Report, ...]:
    """Serve keeps the values of each measure together; here are those of each moment."""
    reports: dict[float, dict[str, float]] = defaultdict(dict)
    for name in load_metrics.MEASURES:
        for point in metrics.get(name, {}).get(replica, ()):
            reports[point.timestamp][name] = point.value
    return tuple(load_metrics.Report(at, **measures) for at, measures in sorted(reports.items()))


def _stats(**measures: float | None) -> dict[str, float]:
    return {name: float(value or 0.0) for name, value in measures.items()}


def _policy(rules: decision.Rules, period_s: float) -> AutoscalingPolicy:
    """With all that it needs inside: where an application brings its own code, Serve's controller
    has none of our modules."""
    modules = (load_metrics, decision)
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return AutoscalingPolicy(
            policy_function=Autoscaler,
            policy_kwargs={"rules": dataclasses.asdict(rules), "period_s": period_s},
        )
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
