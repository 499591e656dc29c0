"""The number of replicas: single decisions, and a simulated cluster that follows them."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.autoscaling.decision import Observation, ScalingRules, ScalingState, decide
from serve_app.autoscaling.load_metrics import ScalingMetrics, ScalingTargets
from tests.unit.serve_app.autoscaling.simulated_cluster import STEP_S, Cluster, ReplicaModel

RULES = ScalingRules(
    ScalingTargets(queue_s=5.0), upscale_delay_s=4.0, downscale_delay_s=60.0, zero_delay_s=60.0
)
NO_DELAY = replace(RULES, upscale_delay_s=0.0)
IDLE = ScalingMetrics(0.0, slots=16, work_per_s=1000)


def observe(*metrics, target=None, now=100.0, min_replicas=0, held=0.0, skew=0.0):
    """Running replicas; None for one that has not reported. `skew`: of their clocks."""
    times = [skew + now - seconds for seconds in (4, 2, 0)]
    running = {
        f"r{i}": () if each is None else tuple(replace(each, at=at) for at in times)
        for i, each in enumerate(metrics)
    }
    target = len(metrics) if target is None else target
    return Observation(now, target, min_replicas, 10, running, held)


def queued(tokens):
    return replace(IDLE, queued_work=tokens, running=4, waiting=20, slots=64)


def decided(*metrics, rules=NO_DELAY, **observation):
    return decide(rules, observe(*metrics, **observation), ScalingState())[0]


def poisson(rate, prompt_tokens, answer_s, seed=0):
    """Random arrivals, `rate` a second: a number, or a function of the time."""
    random = Random(seed)

    def arrive(cluster):
        expected = STEP_S * (rate(cluster.now) if callable(rate) else rate)
        due = random.expovariate(1)
        while due < expected:
            cluster.send(random.expovariate(1 / prompt_tokens), answer_s)
            due += random.expovariate(1)

    return arrive


def direction_changes(cluster):
    grew = [b > a for (_, a), (_, b) in pairwise(cluster.targets)]
    return sum(a != b for a, b in pairwise(grew))


@pytest.mark.parametrize(
    ("tokens", "replicas"), [(0, 1), (4000, 1), (5001, 2), (20_000, 4), (90_000, 10)]
)
def test_one_decision_adds_all_replicas_that_the_queue_needs(tokens, replicas):
    assert decided(queued(tokens)) == replicas


def test_a_queue_on_one_replica_adds_none_while_another_is_free():
    assert decided(queued(40_000), IDLE) == 2
    assert decided(queued(40_000), queued(40_000)) > 2


@pytest.mark.parametrize(
    "full",
    [
        replace(IDLE, running=16, waiting=24),
        replace(IDLE, running=10, waiting=10, kv_occupancy=0.9),
    ],
)
def test_lack_of_slots_or_pages_adds_replicas(full):
    assert decided(full) > 1
    assert decided(full, IDLE) == 2


def test_an_on_demand_process_is_added_once_a_model_was_refused_for_lack_of_memory():
    busy = replace(IDLE, running=4, model_memory=1.0)
    assert decided(busy) == 1, "memory that is all in use is no lack yet"
    assert decided(replace(busy, model_memory=1.5)) == 2
    assert decided(replace(busy, model_memory=1.5), IDLE) == 2, "the other process has memory"


def test_an_on_demand_process_whose_models_are_in_use_is_not_stopped():
    state, busy = ScalingState(), replace(IDLE, running=1, model_memory=0.8)
    for now in range(0, 300, 2):
        target, state = decide(RULES, observe(busy, busy, now=now), state)
        assert target == 2


@pytest.mark.parametrize("others", [(), (IDLE,)])
def test_no_on_demand_process_is_stopped_while_one_pulls_a_model(others):
    """Serve chooses which process is stopped."""
    state, pulling = ScalingState(), replace(IDLE, operations=1)
    for now in range(0, 300, 2):
        target, state = decide(RULES, observe(pulling, *others, now=now), state)
        assert target == 1 + len(others)
    while target:
        now += 2
        target, state = decide(RULES, observe(IDLE, *others, now=now), state)
    assert 300 < now < 400


def test_there_are_never_more_replicas_than_requests():
    one = replace(IDLE, running=1, queued_work=90_000, kv_occupancy=1.0)
    assert decided(one) == 1
    assert decided(replace(one, waiting=1)) == 2


def test_an_encoder_scales_by_its_queue_and_measured_speed():
    reports = [
        ScalingMetrics(2.0 * i, waiting=60 - 4 * i, queued_work=60 - 4 * i, work_total=4 * i)
        for i in range(5)
    ]
    observed = Observation(8.0, 1, 1, 10, {"encoder": tuple(reports)})
    assert decide(NO_DELAY, observed, ScalingState())[0] == 5  # 44 images, 2/s, 5 s each


def test_encoders_that_are_busy_with_short_queues_are_all_kept():
    state = ScalingState(work_per_s=1.0)
    for now in range(0, 62, 2):
        reports = tuple(ScalingMetrics(at, waiting=1, work_total=at) for at in (now - 2.0, now))
        observed = Observation(now, 2, 1, 10, {"one": reports, "two": reports})
        target, state = decide(RULES, observed, state)
        assert target == 2


def test_a_target_must_be_exceeded_for_the_whole_upscale_delay():
    state = ScalingState()
    for now, metrics in (
        (0, queued(20_000)),
        (3, queued(20_000)),
        (3.5, IDLE),
        (4, queued(20_000)),
    ):
        target, state = decide(RULES, observe(metrics, now=now), state)
        assert target == 1
    assert decide(RULES, observe(queued(15_000), now=8.0), state)[0] == 3


def test_downscaling_keeps_what_was_needed_at_any_time_of_the_delay():
    state = ScalingState()
    for now in range(0, 62, 2):
        load = replace(IDLE, running=6 if now == 30 else 1)  # 24 need three replicas
        target, state = decide(RULES, observe(*[load] * 4, now=float(now)), state)
        assert target == (4 if now < 60 else 3)


def test_a_replica_that_has_stopped_reporting_is_not_idle():
    state, rules = ScalingState(), replace(RULES, downscale_delay_s=1e9)
    for now in range(0, 300, 2):
        silent = Observation(float(now), 1, 0, 10, {"r0": (IDLE,)})
        target, state = decide(rules, silent, state)
        assert target == 1
    reported = Observation(300.0, 1, 0, 10, {"r0": (replace(IDLE, at=300.0),)})
    assert decide(rules, reported, state)[0] == 0


@pytest.mark.parametrize(
    ("metrics", "delay_s", "expected"),
    [((queued(20_000),), 4, 4), ((IDLE, IDLE), 60, 1), ((IDLE,), 60, 0)],
)
def test_delays_continue_when_the_clock_is_set_back(metrics, delay_s, expected):
    state, count, decisions = ScalingState(), len(metrics), []
    half = delay_s // 2
    for now in [*range(9000, 9000 + half + 1), *range(delay_s)]:
        observed = observe(*metrics, now=float(now), min_replicas=min(1, expected))
        target, state = decide(RULES, observed, state)
        decisions.append(target)
    # No time passes between the decision at 9000 + half and the one at 0.
    assert decisions.index(expected) == delay_s + 1
    assert set(decisions[: delay_s + 1]) == {count}


def test_requests_queued_while_replicas_start_add_no_more_replicas():
    _, state = decide(NO_DELAY, observe(queued(11_000)), ScalingState())
    for now in range(101, 140):
        growing = observe(queued(11_000 + 500 * (now - 100)), target=3, now=now)
        target, state = decide(NO_DELAY, growing, state)
        assert target == 3
    # Two replicas have started; the queue of the first one stays there.
    target, state = decide(NO_DELAY, observe(queued(30_000), IDLE, IDLE, now=141), state)
    assert target == 3
    # New requests fill the two beyond their targets.
    full = observe(queued(30_000), queued(5500), queued(5500), now=143)
    assert decide(NO_DELAY, full, state)[0] == 4


def test_more_replicas_than_the_maximum_are_reduced_at_once():
    assert decided(IDLE, target=12) == 10


def test_a_replica_without_a_report_counts_as_starting():
    assert decided(queued(40_000), None) == 2
    assert decided(None, target=1, min_replicas=1) == 1


def test_a_replica_whose_reports_have_stopped_prevents_downscaling():
    rules = replace(NO_DELAY, downscale_delay_s=10.0)
    state = ScalingState()
    for now in range(0, 200, 5):
        observed = observe(IDLE, IDLE, now=float(now), min_replicas=1)
        running = {**observed.running, "r1": (replace(IDLE, at=-20.0),)}
        target, state = decide(rules, replace(observed, running=running), state)
        assert target == 2


@pytest.mark.parametrize("skew", [0.0, 1000.0, -1000.0])
def test_the_last_replica_stops_only_after_the_whole_delay_without_work(skew):
    rules, state = replace(RULES, zero_delay_s=50.0), ScalingState()
    for now in range(300):
        metrics = replace(IDLE, running=float(now in (30, 80)))
        target, state = decide(rules, observe(metrics, now=float(now), skew=skew), state)
        if target == 0:
            break
    assert now == 130


def test_work_between_two_reports_keeps_the_last_replica():
    state = ScalingState()
    for now in range(300):
        metrics = replace(IDLE, steps_total=float(now >= 30) + float(now >= 80))
        target, state = decide(RULES, observe(metrics, now=float(now)), state)
        if target == 0:
            break
    assert now == 140


def test_the_last_replica_is_not_stopped_while_its_reports_are_late():
    """A busy machine may report late."""
    state = ScalingState()
    for now in range(300):
        observed = observe(IDLE, now=float(min(now, 50)))
        target, state = decide(RULES, replace(observed, now=float(now)), state)
    assert target == 1


@pytest.mark.parametrize("held", [0.0, 0.1])
def test_requests_held_for_a_replica_keep_the_last_one(held):
    state, targets = ScalingState(), set()
    for now in range(200):
        target, state = decide(RULES, observe(IDLE, now=float(now), held=held), state)
        targets.add(target)
    assert targets == ({1} if held else {0, 1})


def test_a_burst_of_long_prompts_scales_up_once_and_down_again():
    cluster = Cluster(RULES)
    cluster.run(60)
    for _ in range(10):
        cluster.send(4000, 5.0)
    cluster.run(600)
    (_, first), (at, second), *later = cluster.targets
    assert (first, second) == (1, 7)  # 34,000 of 40,000 tokens are left after the delay
    assert at < 60 + 10
    assert [n for _, n in later] == sorted((n for _, n in later), reverse=True)
    assert cluster.target == 1


@pytest.mark.parametrize(
    ("rate", "prompt_tokens", "answer_s"),
    [(0.8, 1000, 5.0), (2.0, 1000, 5.0), (0.1, 5000, 10.0), (1.0, 50, 20.0)],
)
def test_a_steady_random_load_rarely_changes_the_target(rate, prompt_tokens, answer_s):
    cluster = Cluster(ScalingRules(), model=ReplicaModel(start_s=10.0))
    cluster.run(1200, poisson(rate, prompt_tokens, answer_s))
    assert direction_changes(cluster) <= 2
    waits = sorted(
        (each.first_token_at or cluster.now) - each.arrived_at - each.prompt_tokens / 1000
        for each in cluster.requests
        if each.arrived_at > 300
    )
    assert waits[int(0.95 * len(waits))] < ScalingRules().targets.queue_s


def test_the_target_follows_a_load_that_rises_and_falls_once():
    cluster = Cluster(RULES, max_replicas=12)
    cluster.run(900, poisson(lambda t: 4.0 if 200 < t < 500 else 0.1, 1000, 5.0))
    assert max(n for _, n in cluster.targets) >= 5  # 4,000 tokens/s need four, and some reserve
    assert cluster.target <= 2
    assert direction_changes(cluster) == 1


def test_scaling_from_zero_to_one_and_back_keeps_the_request():
    cluster = Cluster(RULES, min_replicas=0)
    cluster.run(30)
    request = cluster.send(400, 5.0)
    cluster.run(200)
    assert [n for _, n in cluster.targets] == [0, 1, 0]
    assert request.first_token_at is not None
    stopped_at = cluster.targets[-1][0]
    assert stopped_at - (request.first_token_at + request.answer_s) >= RULES.zero_delay_s


@settings(max_examples=15)
@given(st.data())
def test_any_load_keeps_the_target_within_bounds_and_downscaling_delayed(data):
    phases = data.draw(
        st.lists(
            st.tuples(
                st.floats(0, 5),
                st.sampled_from([20, 500, 4000]),
                st.floats(0, 30),
                st.floats(5, 60),
            ),
            min_size=1,
            max_size=6,
        )
    )
    min_replicas = data.draw(st.integers(0, 2))
    cluster = Cluster(
        replace(RULES, downscale_delay_s=30.0, zero_delay_s=40.0),
        min_replicas=min_replicas,
        max_replicas=min_replicas + data.draw(st.integers(1, 6)),
        model=ReplicaModel(start_s=data.draw(st.floats(0, 60))),
    )
    for rate, prompt_tokens, answer_s, seconds in phases:
        arrivals = poisson(rate, prompt_tokens, answer_s, seed=len(cluster.requests))
        cluster.run(seconds, arrivals)
    assert all(cluster.min_replicas <= n <= cluster.max_replicas for _, n in cluster.targets)
    for (changed_at, before), (at, after) in pairwise(cluster.targets):
        assert after > before or at - changed_at >= 30.0 or after == 0
    assert direction_changes(cluster) <= 2 * (cluster.now / 30.0) + 1
