"""Requested replicas that do not run: pending, slow to start, or failing repeatedly."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.autoscaling.decision import Observation, ScalingRules, ScalingState, decide
from serve_app.autoscaling.load_metrics import ScalingMetrics, ScalingTargets
from tests.unit.serve_app.autoscaling.simulated_cluster import STEP_S, Cluster, ReplicaModel

START_S = 60.0
RULES = ScalingRules(
    ScalingTargets(queue_s=5.0),
    upscale_delay_s=4.0,
    downscale_delay_s=60.0,
    zero_delay_s=60.0,
    start_timeout_s=START_S,
)
IDLE = ScalingMetrics(0.0, slots=16, work_per_s=1000)
FULL = replace(IDLE, running=16, waiting=24)


def burst(cluster, count=10):
    return [cluster.send(4000, 5.0) for _ in range(count)]


def steady(per_s):
    """Requests at even intervals; each has 1,000 tokens, one second of a replica's time."""

    def arrive(cluster):
        for _ in range(int(cluster.now * per_s) - int((cluster.now - STEP_S) * per_s)):
            cluster.send(1000, 5.0)

    return arrive


def follow(rules, moments, *, target, min_replicas=0):
    """The decisions with their times. A moment has its time, the last reports of the running
    replicas (None: no report yet), and the number of requests held for a replica."""
    state, targets = ScalingState(), []
    for now, running, held in moments:
        histories = {
            name: () if report is None else (replace(report, at=now - 2.0), replace(report, at=now))
            for name, report in running.items()
        }
        observed = Observation(now, target, min_replicas, 10, histories, held)
        target, state = decide(rules, observed, state)
        targets.append((now, target))
    return targets


def moments(times, running, held=0.0):
    return [(float(now), running, held) for now in times]


def last_change(targets):
    return next(at for at, n in targets if n == targets[-1][1])


@pytest.mark.parametrize("min_replicas", [0, 1])
def test_idle_replicas_stop_although_one_is_pending(min_replicas):
    cluster = Cluster(RULES, min_replicas=min_replicas, max_replicas=3, nodes=2)
    requests = burst(cluster)
    cluster.run(600)
    assert max(n for _, n in cluster.targets) == 3
    assert all(request.first_token_at is not None for request in requests)
    assert cluster.target == len(cluster.replicas) == min_replicas


def test_a_pending_first_replica_is_given_up_once_no_request_waits():
    held, none = moments(range(1, 200), {}, held=1.0), moments(range(200, 600), {})
    targets = follow(RULES, held + none, target=1)
    assert targets[198][1] == 1, "a request still waits"
    assert targets[-1] == (599.0, 0)


def test_a_first_replica_has_the_start_timeout_even_with_a_shorter_delay_to_zero():
    """Otherwise repeated requests would never complete a long start."""
    rules = replace(RULES, zero_delay_s=5.0)
    targets = follow(rules, moments(range(1, 120), {}), target=1)
    assert last_change(targets) == pytest.approx(START_S, abs=2)


def test_a_pending_replica_stays_while_the_load_needs_it():
    cluster = Cluster(RULES, min_replicas=1, max_replicas=3, nodes=2)
    cluster.run(900, steady(2.4))
    assert [n for _, n in cluster.targets] == sorted(n for _, n in cluster.targets)
    assert cluster.target == 3 and len(cluster.running) == 2
    cluster.run(2000)
    assert cluster.target == 1 and all(
        request.first_token_at is not None for request in cluster.requests
    )


def test_a_start_longer_than_the_timeout_is_not_given_up_under_load():
    cluster = Cluster(
        RULES, min_replicas=1, max_replicas=2, model=ReplicaModel(start_s=10 * START_S)
    )
    cluster.run(20 * START_S, steady(1.4))
    assert [n for _, n in cluster.targets] == [1, 2]
    assert len(cluster.running) == 2


def test_a_pending_replica_starts_on_a_new_node():
    cluster = Cluster(RULES, min_replicas=1, max_replicas=3, nodes=1)
    cluster.run(300, steady(2.4))
    cluster.nodes = 3
    cluster.run(300, steady(2.4))
    assert len(cluster.running) == 3


def test_replicas_above_the_minimum_stop_although_the_minimum_is_pending():
    cluster = Cluster(RULES, min_replicas=3, max_replicas=6, nodes=1)
    burst(cluster, 20)
    cluster.run(900)
    assert max(n for _, n in cluster.targets) > 3
    assert cluster.target == 3


def test_an_idle_deployment_with_a_pending_replica_frees_its_nodes_for_another():
    first = Cluster(RULES, min_replicas=0, max_replicas=3, nodes=2)
    second = Cluster(RULES, min_replicas=0, max_replicas=1, nodes=0)
    burst(first)
    first.run(60)
    request = second.send(400, 5.0)
    for _ in range(400):
        first.run(1)
        second.nodes = 2 - first.placed
        second.run(1)
    assert request.first_token_at is not None
    assert first.target == second.target == 0


def test_idle_replicas_stop_although_a_lost_one_finds_no_node():
    cluster = Cluster(RULES, min_replicas=0, max_replicas=4)
    burst(cluster)
    cluster.run(80)
    assert len(cluster.running) > 2
    cluster.nodes = 1
    while len(cluster.running) > 1:
        cluster.lose(cluster.running[-1])
    cluster.run(600)
    assert cluster.target == 0


@pytest.mark.parametrize("lives_s", [5, 45, 100])
@pytest.mark.parametrize("away_s", [5, 65, 115])
@pytest.mark.parametrize("start_timeout_s", [10.0, 60.0, 600.0])
def test_idle_replicas_stop_although_one_fails_repeatedly(lives_s, away_s, start_timeout_s):
    """A replica that cannot load its model reports, fails its health check, and is replaced."""
    rules = replace(RULES, start_timeout_s=start_timeout_s)
    timeline = []
    for now in range(1, 1500, 2):
        failing = {"c": IDLE} if now % (lives_s + away_s) < lives_s else {}
        timeline.append((float(now), {"a": IDLE, "b": IDLE, **failing}, 0.0))
    assert follow(rules, timeline, target=3, min_replicas=1)[-1][1] == 1


def test_idle_replicas_stop_although_two_fail_alternately():
    timeline = []
    for now in range(1, 1000):
        c = {"c": IDLE} if now % 40 > 5 else {}
        d = {"d": IDLE} if (now + 20) % 40 > 5 else {}
        timeline.append((float(now), {"a": IDLE, "b": IDLE, **c, **d}, 0.0))
    assert follow(RULES, timeline, target=4, min_replicas=1)[-1][1] == 1


def two_losses(first, second, load, *, between=(), until=900):
    """Three replicas: `c` is lost at `first` and `b` at `second`, each is replaced after 40 s. At
    the times `between` a further one runs that has not reported."""
    timeline = []
    for now in range(1, until):
        names = {"a": load}
        names |= {"b": load} if now < second else {"b1": IDLE} if now >= second + 40 else {}
        names |= {"c": IDLE} if now < first else {"c1": load} if now >= first + 40 else {}
        names |= {"new": None} if now in between else {}
        timeline.append((float(now), names, 0.0))
    return timeline


@pytest.mark.parametrize(("second", "between"), [(150, ()), (300, ()), (600, range(350, 355))])
def test_no_replicas_are_added_while_a_second_lost_one_restarts(second, between):
    timeline = two_losses(100, second, FULL, between=between, until=second + 39)
    # The first replacement is full only after the second loss.
    timeline = [
        (now, {**names, "c1": IDLE} if "c1" in names and now < second else names, held)
        for now, names, held in timeline
    ]
    assert {n for _, n in follow(ScalingRules(), timeline, target=3)} == {3}


def test_no_replicas_are_added_while_a_replacement_restarts():
    timeline = []
    for now in range(1, 540):
        c = {"c": IDLE} if now < 100 else {"c1": IDLE} if 140 <= now < 500 else {}
        timeline.append((float(now), {"a": FULL, "b": FULL, **c}, 0.0))
    assert {n for _, n in follow(ScalingRules(), timeline, target=3)} == {3}


def test_no_replicas_are_added_for_a_loss_after_scaling_from_zero():
    rules, state = ScalingRules(), ScalingState()
    for now in (1.0, 400.0):
        idle = {"a": (replace(IDLE, at=now),)}
        target, state = decide(rules, Observation(now, 1, 0, 10, idle), state)
    assert target == 0
    timeline = [(float(now), {}) for now in range(500, 530)]
    timeline += [(float(now), {"b": FULL, "c": IDLE, "d": FULL}) for now in range(530, 650)]
    timeline += [(float(now), {"b": FULL, "d": FULL}) for now in range(650, 689)]
    for now, running in timeline:
        histories = {
            name: (replace(report, at=now - 2.0), replace(report, at=now))
            for name, report in running.items()
        }
        target, state = decide(rules, Observation(now, 3, 0, 10, histories), state)
        assert target == 3


def test_idle_replicas_stop_although_one_never_reports():
    targets = follow(
        RULES, moments(range(1, 400), {"a": IDLE, "b": None}), target=2, min_replicas=1
    )
    assert targets[-1][1] == 1


def test_replicas_are_added_once_starting_ones_are_overdue():
    targets = follow(RULES, moments(range(1, 300, 2), {"a": FULL, "b": FULL}), target=3)
    assert last_change(targets) > START_S
    assert targets[-1][1] > 3


def test_each_upscale_restarts_the_start_timeout():
    timeline = []
    for now in range(1, 1000, 2):
        fuller = replace(FULL, waiting=24 + now / 4)
        timeline.append((float(now), {"a": fuller, "b": fuller}, 0.0))
    targets = follow(RULES, timeline, target=3)
    changes = [at for (_, before), (at, after) in pairwise(targets) if after != before]
    assert len(changes) > 1
    assert all(b - a >= START_S for a, b in pairwise(changes))


def test_a_single_replica_that_fails_repeatedly_does_not_prevent_scaling_to_zero():
    timeline = []
    for now in range(1, 600):
        timeline.append((float(now), {"a": IDLE} if now % 55 < 45 else {}, 0.0))
    assert follow(RULES, timeline, target=1)[-1][1] == 0


@settings(max_examples=10)
@given(st.data())
def test_an_idle_deployment_ends_at_its_minimum_whatever_was_pending(data):
    draw = data.draw
    min_replicas = draw(st.integers(0, 2))
    cluster = Cluster(
        replace(RULES, start_timeout_s=draw(st.floats(1, 100)), zero_delay_s=40.0),
        min_replicas=min_replicas,
        max_replicas=min_replicas + draw(st.integers(1, 6)),
        nodes=draw(st.integers(1, 4)),
        model=ReplicaModel(start_s=draw(st.floats(0, 150))),
    )
    for _ in range(draw(st.integers(1, 5))):
        cluster.run(draw(st.floats(5, 60)), steady(draw(st.floats(0, 2))))
        if cluster.running and draw(st.booleans()):
            cluster.lose(cluster.running[-1])
        cluster.nodes = draw(st.integers(1, 4))
    cluster.run(1500)  # longer than all work on one node and the delays
    assert all(request.first_token_at is not None for request in cluster.requests)
    assert cluster.target == len(cluster.replicas) == min_replicas
