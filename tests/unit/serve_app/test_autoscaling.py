"""Serve's side: what replicas report, what the policy makes of Serve's context, and delays."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
from ray.serve.config import AutoscalingContext

from runtime.engine.engine import EngineStatistics
from serve_app.autoscaling.load_metrics import MEASURES
from serve_app.autoscaling.serve_policy import (
    autoscaling_config,
    encoder_stats,
    engine_stats,
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


def context(*told, target=None, now=100.0, state=None, queued=0.0):
    """What Serve hands over: the values of each measure, of each replica, now and 2 s before."""
    replicas = [f"r{i}" for i in range(len(told))]
    metrics = {
        name: {
            replica: [Point(now - 2.0, stats[name]), Point(now, stats[name])]
            for replica, stats in zip(replicas, told, strict=True)
            if name in stats
        }
        for name in MEASURES
    }
    return AutoscalingContext(
        deployment_id=None,
        deployment_name="demo",
        app_name="caravan",
        current_num_replicas=len(told),
        target_num_replicas=len(told) if target is None else target,
        running_replicas=replicas,
        total_num_requests=0.0,
        total_queued_requests=lambda: queued,
        aggregated_metrics=None,
        raw_metrics=lambda: metrics,
        capacity_adjusted_min_replicas=SETTINGS.min_replicas,
        capacity_adjusted_max_replicas=SETTINGS.max_replicas,
        policy_state=state or {},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=now,
        config=None,
    )


def test_every_measure_of_a_report_is_told_by_replicas():
    of_models_on_demand = {"room_used", "room_lacking"}
    assert set(engine_stats(BUSY)) == set(MEASURES) - of_models_on_demand
    pool = PoolLoad().read({"a": BUSY}, held=0, used=0.5)
    assert set(pool) == set(MEASURES)
    told = encoder_stats(images_waiting=3, images_encoded_total=9, images_known_total=1)
    assert told.keys() <= set(MEASURES)
    assert all(type(value) is float for value in engine_stats(EngineStatistics()).values())


def test_images_that_a_pool_encodes_are_no_work_of_the_replica():
    seeing = EngineStatistics(images_waiting=5, images_encoded_total=7)
    assert engine_stats(seeing)["queued_images"] == 5
    assert engine_stats(seeing, encodes=False)["queued_images"] == 0


def test_the_policy_sees_what_the_replicas_told():
    target, _ = policy()(context(engine_stats(BUSY)))
    assert target == 4  # 20,000 tokens at 1,000 a second in five seconds


def test_the_queue_of_a_model_on_demand_is_seen_as_that_of_any_other():
    idle = EngineStatistics(slots=64, tokens_per_s=10.0)
    told = PoolLoad().read({"a": BUSY, "b": idle}, held=0, used=0.5)
    assert policy()(context(told))[0] == 4


def test_what_it_remembers_comes_back_with_serves_context():
    decide = policy()
    _, state = decide(context(engine_stats(BUSY)))
    grown = engine_stats(BUSY) | {"queued_tokens": 90_000.0}
    assert decide(context(grown, target=4, now=101.0, state=state))[0] == 4
    assert policy()(context(grown))[0] == 8


def test_between_two_reports_it_says_what_it_said():
    decide = policy()
    told = engine_stats(BUSY)
    target, state = decide(context(told, told, told, told))
    assert decide(context(told, target=target, now=100.1, state=state)) == (target, state)


def test_a_replica_that_told_nothing_is_one_that_starts():
    assert policy()(context(engine_stats(BUSY), {}))[0] == 2


def test_serve_delays_nothing_by_itself():
    config = autoscaling_config(SETTINGS, start_timeout_s=60.0)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (0, 0)
    assert config.downscale_to_zero_delay_s is None
    assert (config.metrics_interval_s, config.look_back_period_s) == (2, 10)


@pytest.mark.parametrize("placed", [0, 2])
def test_from_three_of_which_some_are_pending_it_goes_to_zero_by_way_of_serves_one(placed):
    settings = AutoscalingSettings(
        min_replicas=0, max_replicas=8, downscale_delay_s=600, downscale_to_zero_delay_s=20
    )
    decide, idle = policy(settings), engine_stats(EngineStatistics(slots=64))
    state, targets = {}, [3]
    for now in range(100, 300):
        running = [idle] * min(targets[-1], placed)
        told = context(*running, target=targets[-1], now=float(now), state=state)
        target, state = decide(told)
        target = max(target, 1) if targets[-1] > 1 else target
        targets += [target] if target != targets[-1] else []
        if target == 0:
            break
    assert now - 100 < 60 + 20 + 10, "Serve's 1 was taken for a new request for a replica"
    assert targets == [3, 1, 0]


@pytest.mark.parametrize(("given", "zero_delay_s"), [({}, 300), ({"to_zero": 900}, 900)])
def test_the_last_replica_has_a_delay_of_its_own(given, zero_delay_s):
    settings = AutoscalingSettings(downscale_to_zero_delay_s=given.get("to_zero"))
    assert rules(settings).zero_delay_s == zero_delay_s


def test_the_last_replica_never_goes_while_serve_still_counts_its_last_request():
    """Of the mean over its window Serve would make another replica at once."""
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
