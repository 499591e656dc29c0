"""Serve's side of autoscaling: reports of replicas, the policy in Serve's context, delays."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
from ray.serve.config import AutoscalingContext

from runtime.engine.engine_statistics import EngineStatistics
from serve_app.autoscaling.load_metrics import METRIC_NAMES
from serve_app.autoscaling.serve_policy import (
    autoscaling_config,
    encoder_metrics,
    engine_metrics,
    scaling_rules,
)
from serve_app.config.sections import AutoscalingSettings
from serve_app.on_demand.pool_load import PoolLoad

SETTINGS = AutoscalingSettings(min_replicas=0, max_replicas=8, upscale_delay_s=0)
BUSY = EngineStatistics(
    running=4, waiting=20, slots=64, queued_tokens=20_000, tokens_per_s=1000.0, kv_occupancy=0.5
)
WITHOUT_OUR_MODULES = """
import sys
from ray import cloudpickle

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"serve_app", "runtime", "model_zoo", "torch"}:
            raise ModuleNotFoundError(f"{name} is hidden")

sys.meta_path.insert(0, Hide())
policy = cloudpickle.loads(sys.stdin.buffer.read())
print(policy(**eval(sys.argv[1]))._rules.targets.queue_s)
"""


@dataclass(frozen=True)
class Point:
    timestamp: float
    value: float


def policy(settings=SETTINGS):
    config = autoscaling_config(settings, start_timeout_s=60.0).policy
    return config.get_policy()(**config.policy_kwargs)


def rules(settings):
    return scaling_rules(settings, start_timeout_s=60.0)


def context(*metrics, target=None, now=100.0, state=None, queued=0.0):
    """Serve's context. Each replica has reported the same values twice: now and 2 s ago."""
    replicas = [f"r{i}" for i in range(len(metrics))]
    series = {
        name: {
            replica: [Point(now - 2.0, each[name]), Point(now, each[name])]
            for replica, each in zip(replicas, metrics, strict=True)
            if name in each
        }
        for name in METRIC_NAMES
    }
    return AutoscalingContext(
        deployment_id=None,
        deployment_name="demo",
        app_name="caravan",
        current_num_replicas=len(metrics),
        target_num_replicas=len(metrics) if target is None else target,
        running_replicas=replicas,
        total_num_requests=0.0,
        total_queued_requests=lambda: queued,
        aggregated_metrics=None,
        raw_metrics=lambda: series,
        capacity_adjusted_min_replicas=SETTINGS.min_replicas,
        capacity_adjusted_max_replicas=SETTINGS.max_replicas,
        policy_state=state or {},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=now,
        config=None,
    )


def test_replicas_report_all_metrics_by_their_names():
    on_demand = PoolLoad().metrics([BUSY], held_requests=0, used_share=0.5)
    encoder = encoder_metrics(images_waiting=3, images_encoded_total=9, images_known_total=1)
    assert set(on_demand) == set(METRIC_NAMES) - {"operations"}
    assert set(engine_metrics(BUSY)) == set(METRIC_NAMES) - {"model_memory", "operations"}
    assert encoder.keys() <= set(METRIC_NAMES)
    assert all(type(value) is float for value in engine_metrics(EngineStatistics()).values())


def test_the_policy_decides_from_the_reports_in_serves_context():
    target, _ = policy()(context(engine_metrics(BUSY)))
    assert target == 4  # 20,000 tokens, 1,000/s, 5 s each


def test_the_queue_of_an_on_demand_model_counts_like_any_other():
    idle = EngineStatistics(slots=64, tokens_per_s=10.0)
    metrics = PoolLoad().metrics([BUSY, idle], held_requests=0, used_share=0.5)
    assert policy()(context(metrics))[0] == 4


def test_the_state_is_kept_in_serves_context():
    decide = policy()
    _, state = decide(context(engine_metrics(BUSY)))
    grown = engine_metrics(BUSY) | {"queued_work": 90_000.0}
    assert decide(context(grown, target=4, now=101.0, state=state))[0] == 4
    assert policy()(context(grown))[0] == 8


def test_the_decision_stands_until_the_next_period():
    decide = policy()
    busy = engine_metrics(BUSY)
    target, state = decide(context(busy, busy, busy, busy))
    assert decide(context(busy, target=target, now=100.1, state=state)) == (target, state)


def test_a_replica_without_a_report_counts_as_starting():
    assert policy()(context(engine_metrics(BUSY), {}))[0] == 2


def test_serves_own_delays_are_off():
    config = autoscaling_config(SETTINGS, start_timeout_s=60.0)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (0, 0)
    assert config.downscale_to_zero_delay_s is None
    assert (config.metrics_interval_s, config.look_back_period_s) == (2, 10)


@pytest.mark.parametrize("placed", [0, 2])
def test_scaling_from_three_to_zero_passes_through_serves_one(placed):
    settings = AutoscalingSettings(
        min_replicas=0, max_replicas=8, downscale_delay_s=600, downscale_to_zero_delay_s=20
    )
    decide, idle = policy(settings), engine_metrics(EngineStatistics(slots=64))
    state, targets = {}, [3]
    for now in range(100, 300):
        running = [idle] * min(targets[-1], placed)
        target, state = decide(context(*running, target=targets[-1], now=float(now), state=state))
        target = max(target, 1) if targets[-1] > 1 else target
        targets += [target] if target != targets[-1] else []
        if target == 0:
            break
    assert now - 100 < 60 + 20 + 10, "Serve's 1 was taken for an upscale"
    assert targets == [3, 1, 0]


@pytest.mark.parametrize(("given", "zero_delay_s"), [({}, 300), ({"to_zero": 900}, 900)])
def test_the_last_replica_may_have_its_own_delay(given, zero_delay_s):
    settings = AutoscalingSettings(downscale_to_zero_delay_s=given.get("to_zero"))
    assert rules(settings).zero_delay_s == zero_delay_s


def test_the_last_replica_stays_while_serve_still_counts_an_answered_request():
    """Serve would start another replica at once, for the mean over its window."""
    settings = AutoscalingSettings(downscale_to_zero_delay_s=0)
    config = autoscaling_config(settings, start_timeout_s=60.0)
    assert rules(settings).zero_delay_s > config.look_back_period_s


def test_the_policy_runs_where_our_modules_are_not_installed():
    settings = AutoscalingSettings(target_queue_s=1.5)
    config = autoscaling_config(settings, start_timeout_s=60.0).policy
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_OUR_MODULES, repr(config.policy_kwargs)],
        input=config.get_serialized_policy_def(),
        capture_output=True,
    )
    assert done.stdout.strip() == b"1.5", done.stderr.decode()
