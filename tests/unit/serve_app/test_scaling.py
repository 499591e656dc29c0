"""How many replicas: single decisions, and a pretend cluster that lives by them."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.autoscaling.decision import Observation, Rules, State, decide
from serve_app.autoscaling.load_metrics import Report, Targets
from tests.unit.serve_app.elastic import STEP_S, Cluster, Costs

RULES = Rules(Targets(queue_s=5.0), upscale_delay_s=4.0, downscale_delay_s=60.0, zero_delay_s=60.0)
AT_ONCE = replace(RULES, upscale_delay_s=0.0)
IDLE = Report(0.0, slots=16, tokens_per_s=1000)


def seen(*reports, target=None, now=100.0, least=0, most=10, held=0.0, skew=0.0):
    """Replicas that have reported, None for one that has not. `skew`: of their clocks."""
    times = [skew + now - seconds for seconds in (4, 2, 0)]
    running = {
        f"r{i}": () if report is None else tuple(replace(report, at=at) for at in times)
        for i, report in enumerate(reports)
    }
    return Observation(now, len(reports) if target is None else target, least, most, running, held)


def queued(tokens):
    return replace(IDLE, queued_tokens=tokens, running=4, waiting=20, slots=64)


def wanted(*reports, rules=AT_ONCE, **rest):
    return decide(rules, seen(*reports, **rest), State())[0]


def noise(rate, prompt, answer_s, seed=0):
    """Requests at random, `rate` a second: a number, or a function of the time."""
    random = Random(seed)

    def arrive(cluster):
        expected = STEP_S * (rate(cluster.now) if callable(rate) else rate)
        due = random.expovariate(1)
        while due < expected:
            cluster.ask(prompt(random), answer_s)
            due += random.expovariate(1)

    return arrive


def around(mean):
    return lambda random: random.expovariate(1 / mean)


def turns(cluster):
    """How often the cluster has begun to grow after it had shrunk, or the other way round."""
    signs = [b > a for (_, a), (_, b) in pairwise(cluster.targets)]
    return sum(a != b for a, b in pairwise(signs))


@pytest.mark.parametrize(
    ("tokens", "replicas"), [(0, 1), (4000, 1), (5001, 2), (20_000, 4), (90_000, 10)]
)
def test_as_many_at_once_as_bring_the_queue_below_its_target(tokens, replicas):
    assert wanted(queued(tokens)) == replicas


def test_a_queue_on_one_replica_is_no_lack_while_another_is_free():
    assert wanted(queued(40_000), IDLE) == 2
    assert wanted(queued(40_000), queued(40_000)) > 2


@pytest.mark.parametrize(
    "full",
    [
        replace(IDLE, running=16, waiting=24),
        replace(IDLE, running=10, waiting=10, kv_occupancy=0.9),
    ],
)
def test_places_and_pages_run_out_too(full):
    assert wanted(full) > 1
    assert wanted(full, IDLE) == 2


def test_models_on_demand_get_another_process_where_one_was_refused_for_want_of_room():
    busy = replace(IDLE, running=4, room_used=1.0)
    assert wanted(busy) == 1, "that all of it is used is no lack yet"
    assert wanted(replace(busy, room_lacking=0.5)) == 2
    assert wanted(replace(busy, room_lacking=0.5), IDLE) == 2, "there is room in the other one"


def test_a_process_whose_models_are_used_is_not_taken_from_them():
    """However little each of them has to do; the room that they take is nowhere else."""
    state, busy = State(), replace(IDLE, running=1, room_used=0.8)
    for now in range(0, 300, 2):
        target, state = decide(RULES, seen(busy, busy, now=now), state)
        assert target == 2


def test_nobody_needs_more_replicas_than_there_are_requests():
    one = replace(IDLE, running=1, queued_tokens=90_000, kv_occupancy=1.0)
    assert wanted(one) == 1
    assert wanted(replace(one, waiting=1)) == 2


def test_an_encoder_scales_by_the_images_that_wait():
    told = [Report(2.0 * i, queued_images=60 - 4 * i, encoded_images_total=4 * i) for i in range(5)]
    now = Observation(8.0, 1, 1, 10, {"e": tuple(told)})
    assert decide(AT_ONCE, now, State())[0] == 5  # 44 images, two a second, five seconds


def test_a_target_must_be_missed_for_the_whole_delay():
    state = State()
    for now, report in ((0, queued(20_000)), (3, queued(20_000)), (3.5, IDLE), (4, queued(20_000))):
        target, state = decide(RULES, seen(report, now=now), state)
        assert target == 1
    assert decide(RULES, seen(queued(15_000), now=8.0), state)[0] == 3


def test_no_more_are_started_for_a_queue_while_replicas_start_for_it():
    _, state = decide(AT_ONCE, seen(queued(11_000)), State())
    for now in range(101, 140):
        grown = seen(queued(11_000 + 500 * (now - 100)), target=3, now=now)
        target, state = decide(AT_ONCE, grown, state)
        assert target == 3
    # Two are there, and have said so: what waits on the first does not move over to them.
    target, state = decide(AT_ONCE, seen(queued(30_000), IDLE, IDLE, now=141), state)
    assert target == 3
    # Those who come now find no free one: two are a little too full, the first still at its old
    # queue.
    told = seen(queued(30_000), queued(5500), queued(5500), now=143)
    assert decide(AT_ONCE, told, state)[0] == 4


def stream(tokens_per_s, waiting_tokens, *, now=100.0, target=1):
    """One replica that computes 1,000 tokens a second, and what has come to it in eight."""
    times = (0.0, 2.0, 4.0, 6.0, 8.0)
    begun = waiting_tokens - 8 * (tokens_per_s - 1000)
    history = tuple(
        replace(
            queued(begun + after * (tokens_per_s - 1000)),
            at=now - 8 + after,
            computed_tokens_total=1000 * after,
        )
        for after in times
    )
    return Observation(now, target, 1, 10, {"r0": history})


def test_of_what_keeps_coming_there_are_enough_at_once():
    assert decide(AT_ONCE, stream(3000, 16_100), State())[0] == 4  # for the queue
    assert decide(AT_ONCE, stream(3000, 5100), State())[0] == 4  # for what comes, and some room
    assert decide(AT_ONCE, stream(3000, 4000), State())[0] == 1  # nobody has to wait


def test_while_replicas_start_more_are_added_only_for_what_keeps_coming():
    _, state = decide(AT_ONCE, stream(1200, 6000), State())
    assert decide(AT_ONCE, stream(1200, 30_000, now=110.0, target=2), state)[0] == 2
    assert decide(AT_ONCE, stream(3000, 30_000, now=110.0, target=2), state)[0] == 4


def test_late_first_tokens_count_once_they_are_of_the_replicas_that_there_are():
    late = replace(IDLE, running=9, waiting=1, ttft_s=15.0, ttft_queue_s=10.0)
    state, moved = State(), []
    for now in range(0, 80, 2):
        told = seen(replace(late, first_tokens_total=now), target=1, now=float(now), least=1)
        history = (replace(late, at=now - 2.0), *told.running["r0"])
        target, state = decide(AT_ONCE, replace(told, running={"r0": history}), state)
        moved += [now] if target == 2 else []
    assert moved and moved[0] == 42  # 30 s for which they are remembered, 10 s to wait


def test_a_replica_that_has_not_reported_yet_counts_as_one_that_starts():
    assert wanted(queued(40_000), None) == 2
    assert wanted(None, target=1, least=1) == 1


def test_a_replica_that_falls_silent_is_not_taken_for_an_idle_one():
    rules = replace(AT_ONCE, downscale_delay_s=10.0)
    state = State()
    for now in range(0, 200, 5):
        told = seen(IDLE, IDLE, now=float(now))
        silent = {"r0": told.running["r0"], "r1": (replace(IDLE, at=-20.0),)}
        target, state = decide(rules, replace(told, running=silent, least=1), state)
        assert target == 2


@pytest.mark.parametrize("skew", [0.0, 1000.0, -1000.0])
def test_the_last_one_goes_only_after_the_whole_time_without_work(skew):
    state = State()
    for now in range(300):
        working = now in (30, 80)
        report = replace(IDLE, running=float(working))
        target, state = decide(RULES, seen(report, now=float(now), skew=skew), state)
        if target == 0:
            break
    assert now == 140


def test_one_that_stops_reporting_is_never_the_last_one_to_go():
    """A machine that is all too busy with an answer may be late with everything else."""
    state = State()
    for now in range(300):
        report = seen(IDLE, now=float(min(now, 50)))
        target, state = decide(RULES, replace(report, now=float(now)), state)
    assert target == 1


@pytest.mark.parametrize("held", [0.0, 0.1])
def test_requests_that_wait_for_a_replica_keep_the_last_one(held):
    state = State()
    for now in range(200):
        target, state = decide(RULES, seen(IDLE, now=float(now), held=held), state)
    assert target == (1 if held else 0)


def test_a_burst_of_long_prompts_is_one_move_up_and_some_down():
    cluster = Cluster(RULES)
    cluster.run(60)
    for _ in range(10):
        cluster.ask(4000, 5.0)
    cluster.run(600)
    (_, first), (at, second), *downs = cluster.targets
    assert (first, second) == (1, 7)  # of 40,000 tokens 34,000 are left after the delay
    assert at < 60 + 10
    assert [n for _, n in downs] == sorted((n for _, n in downs), reverse=True)
    assert cluster.target == 1


@pytest.mark.parametrize(
    ("rate", "prompt", "answer_s"),
    [(0.8, 1000, 5.0), (2.0, 1000, 5.0), (0.1, 5000, 10.0), (1.0, 50, 20.0)],
)
def test_a_steady_load_with_its_noise_moves_little(rate, prompt, answer_s):
    cluster = Cluster(Rules(), costs=Costs(start_s=10.0))
    cluster.run(1200, noise(rate, around(prompt), answer_s))
    assert turns(cluster) <= 2
    waited = sorted(
        (job.first_at or cluster.now) - job.came_at - job.prompt / 1000
        for job in cluster.jobs
        if job.came_at > 300
    )
    assert waited[int(0.95 * len(waited))] < Rules().targets.queue_s


def test_it_follows_a_load_that_rises_and_falls_once():
    cluster = Cluster(RULES, most=12)
    cluster.run(900, noise(lambda t: 4.0 if 200 < t < 500 else 0.1, around(1000), 5.0))
    assert max(n for _, n in cluster.targets) >= 5  # 4,000 tokens a second need four, and room
    assert cluster.target <= 2
    assert turns(cluster) == 1


def test_from_none_to_one_and_back_without_losing_the_request():
    cluster = Cluster(RULES, least=0)
    cluster.run(30)
    job = cluster.ask(400, 5.0)
    cluster.run(200)
    assert [n for _, n in cluster.targets] == [0, 1, 0]
    assert job.first_at is not None
    last = cluster.targets[-1][0]
    assert last - (job.first_at + job.answer_s) >= RULES.zero_delay_s


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_whatever_comes_it_stays_within_bounds_and_gives_up_only_after_the_delay(data):
    spells = data.draw(
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
    least = data.draw(st.integers(0, 2))
    cluster = Cluster(
        replace(RULES, downscale_delay_s=30.0, zero_delay_s=40.0),
        least=least,
        most=least + data.draw(st.integers(1, 6)),
        costs=Costs(start_s=data.draw(st.floats(0, 60))),
    )
    for rate, prompt, answer_s, seconds in spells:
        cluster.run(seconds, noise(rate, around(prompt), answer_s, seed=len(cluster.jobs)))
    assert all(cluster.least <= n <= cluster.most for _, n in cluster.targets)
    for (begun, before), (at, after) in pairwise(cluster.targets):
        assert after > before or at - begun >= 30.0 or after == 0
    assert turns(cluster) <= 2 * (cluster.now / 30.0) + 1
