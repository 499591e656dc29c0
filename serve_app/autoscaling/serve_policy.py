"""Serve's side of autoscaling: the reports of replicas, and a policy for Serve around `decision`.

Serve calls the policy about ten times a second and applies each decision at once, since its own
delays are 0. Without replicas Serve does not call the policy; a request then starts the first one.
"""

import dataclasses
import warnings
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from ray import cloudpickle
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from runtime.engine.engine_statistics import EngineStatistics
from serve_app.autoscaling import decision, load_metrics
from serve_app.config.sections import AutoscalingSettings

STATE_KEY = "caravan"
# The policy gets this many reports of each replica, and decides this many times per report
# interval.
REPORTS = 5
DECISIONS_PER_REPORT = 4
# For up to this many intervals, Serve counts a request that has ended and would start a replica.
ANSWERED_INTERVALS = REPORTS + 2
SILENT_S = 1.0


def autoscaling_config(
    settings: AutoscalingSettings, *, start_timeout_s: float
) -> AutoscalingConfig:
    """`start_timeout_s`: see `decision.ScalingRules`."""
    rules = scaling_rules(settings, start_timeout_s=start_timeout_s)
    with warnings.catch_warnings():
        # Serve 2.60 deprecates `metrics_interval_s` but has no replacement yet.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            metrics_interval_s=settings.metrics_interval_s,
            look_back_period_s=REPORTS * settings.metrics_interval_s,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            policy=_policy(rules, settings.metrics_interval_s / DECISIONS_PER_REPORT),
        )


def scaling_rules(
    settings: AutoscalingSettings, *, start_timeout_s: float
) -> decision.ScalingRules:
    interval_s, zero_delay_s = settings.metrics_interval_s, settings.downscale_to_zero_delay_s
    if zero_delay_s is None:
        zero_delay_s = settings.downscale_delay_s
    return decision.ScalingRules(
        load_metrics.ScalingTargets(
            queue_s=settings.target_queue_s,
            sequence_occupancy=settings.target_sequence_occupancy,
            kv_occupancy=settings.target_kv_occupancy,
        ),
        upscale_delay_s=settings.upscale_delay_s,
        downscale_delay_s=settings.downscale_delay_s,
        zero_delay_s=max(zero_delay_s, ANSWERED_INTERVALS * interval_s),
        silent_s=SILENT_S + 3 * interval_s,
        start_timeout_s=start_timeout_s,
    )


def engine_metrics(statistics: EngineStatistics) -> dict[str, float]:
    """The report of a model replica."""
    return _metrics(
        running=statistics.running,
        waiting=statistics.waiting,
        slots=statistics.slots,
        kv_occupancy=statistics.kv_occupancy,
        queued_work=statistics.queued_tokens,
        work_per_s=statistics.tokens_per_s,
        work_total=statistics.computed_tokens_total,
        steps_total=statistics.steps_total,
    )


def encoder_metrics(
    *, images_waiting: int, images_encoded_total: int, images_known_total: int
) -> dict[str, float]:
    """The report of a vision encoder, whose speed is derived from successive reports."""
    return _metrics(
        waiting=images_waiting,
        queued_work=images_waiting,
        work_total=images_encoded_total,
        steps_total=images_encoded_total + images_known_total,
    )


class Autoscaler:
    """The policy of one deployment; runs in Serve's controller."""

    def __init__(self, rules: Mapping[str, Any], period_s: float) -> None:
        targets = load_metrics.ScalingTargets(**rules["targets"])
        self._rules = decision.ScalingRules(**{**rules, "targets": targets})
        self._period_s = period_s

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        state = context.policy_state.get(STATE_KEY, decision.ScalingState())
        now, target = context.current_time, context.target_num_replicas
        assert now is not None
        if target == state.target and 0 <= now - state.decided_at < self._period_s:
            return target, context.policy_state
        decided, state = decision.decide(self._rules, observation(context), state)
        if decided == 0 and target > 1:
            # Serve would request 1 instead, which the next decision would treat as an upscale.
            decided, state = 1, dataclasses.replace(state, target=1)
        return decided, {STATE_KEY: state}


def observation(context: AutoscalingContext) -> decision.Observation:
    assert context.current_time is not None
    metrics: Mapping[str, Mapping[Any, Any]] = context.raw_metrics or {}
    return decision.Observation(
        now=context.current_time,
        target=context.target_num_replicas,
        min_replicas=context.capacity_adjusted_min_replicas,
        max_replicas=context.capacity_adjusted_max_replicas,
        running={str(replica): _history(metrics, replica) for replica in context.running_replicas},
        held_requests=context.total_queued_requests,
    )


def _history(
    metrics: Mapping[str, Mapping[Any, Any]], replica: Any
) -> tuple[load_metrics.ScalingMetrics, ...]:
    """The replica's reports; Serve stores them as one series for each metric."""
    reports: dict[float, dict[str, float]] = defaultdict(dict)
    for name in load_metrics.METRIC_NAMES:
        for point in metrics.get(name, {}).get(replica, ()):
            reports[point.timestamp][name] = point.value
    return tuple(load_metrics.ScalingMetrics(at, **each) for at, each in sorted(reports.items()))


def _metrics(**values: float | None) -> dict[str, float]:
    return {name: float(value or 0.0) for name, value in values.items()}


def _policy(rules: decision.ScalingRules, period_s: float) -> AutoscalingPolicy:
    """The policy, pickled with our modules: Serve's controller may not have them installed."""
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
