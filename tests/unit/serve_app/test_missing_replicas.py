"""Replicas that were asked for and are not there: pending, slow to start, lost again and again."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.autoscaling.decision import Observation, Rules, State, decide
from serve_app.autoscaling.load_metrics import Report, Targets
from tests.unit.serve_app.elastic import STEP_S, Cluster, Costs

START_S = 60.0
RULES = Rules(
    Targets(queue_s=5.0),
    upscale_delay_s=4.0,
    downscale_delay_s=60.0,
    zero_delay_s=60.0,
    start_timeout_s=START_S,
)
IDLE = Report(0.0, slots=16, tokens_per_s=1000)
FULL = replace(IDLE, running=16, waiting=24)


def burst(cluster, count=10):
    return [cluster.ask(4000, 5.0) for _ in range(count)]


def asking(per_s):
    """Requests of 1,000 tokens, each a second of a replica's time, at even intervals."""

    def arrive(cluster):
        for _ in range(int(cluster.now * per_s) - int((cluster.now - STEP_S) * per_s)):
            cluster.ask(1000, 5.0)

    return arrive


def follow(rules, moments, *, target, least=0):
    """Each decision with its time, from the first `target` on. A moment: its time, what running
    replicas last reported (None: nothing yet), how many requests wait for a replica."""
    state, targets = State(), []
    for now, running, held in moments:
        reports = {
            name: report and (replace(report, at=now - 2.0), replace(report, at=now))
            for name, report in running.items()
        }
        told = {name: history or () for name, history in reports.items()}
        target, state = decide(rules, Observation(now, target, least, 10, told, held), state)
        targets.append((now, target))
    return targets


def moments(times, running, held=0.0):
    return [(float(now), running, held) for now in times]


def last_change(targets):
    return next(at for at, n in targets if n == targets[-1][1])


@pytest.mark.parametrize("least", [0, 1])
def test_a_replica_that_finds_no_place_keeps_no_idle_ones(least):
    cluster = Cluster(RULES, least=least, most=3, places=2)
    jobs = burst(cluster)
    cluster.run(600)
    assert max(n for _, n in cluster.targets) == 3
    assert all(job.first_at is not None for job in jobs)
    assert cluster.target == len(cluster.replicas) == least


def test_none_of_the_replicas_has_a_place_and_all_requests_have_gone():
    waiting, gone = moments(range(1, 200), {}, held=1.0), moments(range(200, 600), {})
    targets = follow(RULES, waiting + gone, target=1)
    assert targets[198][1] == 1, "a request still waits for it"
    assert targets[-1] == (599.0, 0)


def test_who_asks_again_within_the_start_timeout_finds_the_replica_further_on():
    """However short the delay to zero is; otherwise a long start would never come to its end."""
    rules = replace(RULES, zero_delay_s=5.0)
    targets = follow(rules, moments(range(1, 120), {}), target=1)
    assert last_change(targets) == pytest.approx(START_S + 5.0, abs=2)


def test_a_pending_replica_stays_while_the_load_needs_it():
    cluster = Cluster(RULES, least=1, most=3, places=2)
    cluster.run(900, asking(2.4))
    assert [n for _, n in cluster.targets] == sorted(n for _, n in cluster.targets)
    assert cluster.target == 3 and len(cluster.running) == 2
    cluster.run(2000)
    assert cluster.target == 1 and all(job.first_at is not None for job in cluster.jobs)


def test_a_start_that_takes_many_timeouts_is_not_given_up_under_load():
    cluster = Cluster(RULES, least=1, most=2, costs=Costs(start_s=10 * START_S))
    cluster.run(20 * START_S, asking(1.4))
    assert [n for _, n in cluster.targets] == [1, 2]
    assert len(cluster.running) == 2


def test_a_pending_replica_gets_the_place_that_comes():
    cluster = Cluster(RULES, least=1, most=3, places=1)
    cluster.run(300, asking(2.4))
    cluster.places = 3
    cluster.run(300, asking(2.4))
    assert len(cluster.running) == 3


def test_where_not_even_the_least_have_places_more_than_these_still_go():
    cluster = Cluster(RULES, least=3, most=6, places=1)
    burst(cluster, 20)
    cluster.run(900)
    assert max(n for _, n in cluster.targets) > 3
    assert cluster.target == 3


def test_a_deployment_with_a_pending_replica_leaves_its_places_to_another_one():
    first = Cluster(RULES, least=0, most=3, places=2)
    second = Cluster(RULES, least=0, most=1, places=0)
    burst(first)
    first.run(60)
    job = second.ask(400, 5.0)
    for _ in range(400):
        first.run(1)
        second.places = 2 - first.placed
        second.run(1)
    assert job.first_at is not None
    assert first.target == second.target == 0


def test_a_replica_that_is_lost_and_has_no_place_any_more_keeps_no_idle_ones():
    cluster = Cluster(RULES, least=0, most=4)
    burst(cluster)
    cluster.run(80)
    assert len(cluster.running) > 2
    cluster.places = 1
    while len(cluster.running) > 1:
        cluster.lose(cluster.running[-1])
    cluster.run(600)
    assert cluster.target == 0


@pytest.mark.parametrize("lives_s", [5, 45, 100])
@pytest.mark.parametrize("away_s", [5, 65, 115])
@pytest.mark.parametrize("start_timeout_s", [10.0, 60.0, 600.0])
def test_a_replica_that_fails_again_and_again_keeps_no_idle_ones(lives_s, away_s, start_timeout_s):
    """As one does whose process cannot load its model: it reports, fails, and is replaced."""
    rules = replace(RULES, start_timeout_s=start_timeout_s)
    told = []
    for now in range(1, 3000):
        failing = {"c": IDLE} if now % (lives_s + away_s) < lives_s else {}
        told.append((float(now), {"a": IDLE, "b": IDLE, **failing}, 0.0))
    assert follow(rules, told, target=3, least=1)[-1][1] == 1


def test_two_replicas_that_fail_in_turn_keep_no_idle_ones():
    told = []
    for now in range(1, 1000):
        c = {"c": IDLE} if now % 40 > 5 else {}
        d = {"d": IDLE} if (now + 20) % 40 > 5 else {}
        told.append((float(now), {"a": IDLE, "b": IDLE, **c, **d}, 0.0))
    assert follow(RULES, told, target=4, least=1)[-1][1] == 1


def two_losses(first, second, load, *, between=(), until=900):
    """Three replicas. `c` is lost at `first` and replaced 40 s later; one that ran before is lost
    at `second` and replaced 40 s later. At the times `between` one runs that has not reported."""
    told = []
    for now in range(1, until):
        names = {"a": load}
        names |= {"b": load} if now < second else {"b1": IDLE} if now >= second + 40 else {}
        names |= {"c": IDLE} if now < first else {"c1": load} if now >= first + 40 else {}
        names |= {"new": None} if now in between else {}
        told.append((float(now), names, 0.0))
    return told


@pytest.mark.parametrize(("second", "between"), [(150, ()), (300, ()), (600, range(350, 355))])
def test_no_more_are_asked_for_while_a_second_lost_replica_restarts(second, between):
    told = two_losses(100, second, FULL, between=between, until=second + 39)
    # The replacement of the first is full only once the second is lost.
    told = [
        (now, {**names, "c1": IDLE} if "c1" in names and now < second else names, held)
        for now, names, held in told
    ]
    assert {n for _, n in follow(Rules(), told, target=3)} == {3}


def test_idle_replicas_stay_while_a_second_lost_one_restarts():
    """Without the second loss they are released as long after the first as the delay says."""
    told = two_losses(100, 435, IDLE, until=1000)
    targets = follow(Rules(), told, target=3, least=1)
    released = next(at for at, n in targets if n < 3)
    assert released == pytest.approx(435 + 40 + Rules().downscale_delay_s, abs=2)


def test_a_replacement_that_ran_for_long_is_expected_back_once_it_is_lost():
    told = []
    for now in range(1, 540):
        c = {"c": IDLE} if now < 100 else {"c1": IDLE} if 140 <= now < 500 else {}
        told.append((float(now), {"a": FULL, "b": FULL, **c}, 0.0))
    assert {n for _, n in follow(Rules(), told, target=3)} == {3}


def test_a_replica_stopped_for_want_of_work_is_no_lost_one():
    """Those that come after it are given the start timeout when they are lost."""
    rules, state = Rules(), State()
    for now in (1.0, 400.0):
        idle = {"a": (replace(IDLE, at=now),)}
        target, state = decide(rules, Observation(now, 1, 0, 10, idle), state)
    assert target == 0
    told = [(float(now), {}) for now in range(500, 530)]
    told += [(float(now), {"b": FULL, "c": IDLE, "d": FULL}) for now in range(530, 650)]
    told += [(float(now), {"b": FULL, "d": FULL}) for now in range(650, 689)]
    for now, running in told:
        histories = {
            name: (replace(report, at=now - 2.0), replace(report, at=now))
            for name, report in running.items()
        }
        target, state = decide(rules, Observation(now, 3, 0, 10, histories), state)
        assert target == 3


def test_a_replica_that_runs_and_never_reports_keeps_no_idle_ones():
    targets = follow(RULES, moments(range(1, 400), {"a": IDLE, "b": None}), target=2, least=1)
    assert targets[-1][1] == 1


def test_more_are_asked_for_once_those_that_start_are_overdue():
    """What others were started for, they have not taken over."""
    targets = follow(RULES, moments(range(1, 300, 2), {"a": FULL, "b": FULL}), target=3)
    assert last_change(targets) > START_S
    assert targets[-1][1] > 3


def test_each_time_that_more_are_asked_for_they_have_the_whole_start_timeout():
    told = []
    for now in range(1, 1000, 2):
        fuller = replace(FULL, waiting=24 + now / 4)
        told.append((float(now), {"a": fuller, "b": fuller}, 0.0))
    targets = follow(RULES, told, target=3)
    changes = [at for (_, before), (at, after) in pairwise(targets) if after != before]
    assert len(changes) > 1
    assert all(b - a >= START_S for a, b in pairwise(changes))


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_whatever_finds_no_place_in_the_end_there_are_as_many_as_an_idle_model_needs(data):
    draw = data.draw
    least = draw(st.integers(0, 2))
    cluster = Cluster(
        replace(RULES, start_timeout_s=draw(st.floats(1, 100)), zero_delay_s=40.0),
        least=least,
        most=least + draw(st.integers(1, 6)),
        places=draw(st.integers(1, 4)),
        costs=Costs(start_s=draw(st.floats(0, 150))),
    )
    for _ in range(draw(st.integers(1, 5))):
        cluster.run(draw(st.floats(5, 60)), asking(draw(st.floats(0, 2))))
        if cluster.running and draw(st.booleans()):
            cluster.lose(cluster.running[-1])
        cluster.places = draw(st.integers(1, 4))
    cluster.run(1500)  # more than the work of them all takes in one place, and the delays
    assert all(job.first_at is not None for job in cluster.jobs)
    assert cluster.target == len(cluster.replicas) == least
