"""The routing simulator: its replicas and traces, and our policy compared to others."""

from dataclasses import replace

import pytest

from bench.percentiles import percentile
from bench.simulation.contestants import OTHERS, Ours
from bench.simulation.measure import over_traces, run
from bench.simulation.page import routing_page
from bench.simulation.replica import Job, Replica
from bench.simulation.scenarios import ACCELERATOR, Scenario, everything, late_replicas
from bench.simulation.traces import Mix, Request, Session, Turn, sessions
from bench.simulation.world import ClusterSpec, Outcome, World
from serve_app.messages.replica_load import PrefixHashes


def request(tokens: int, answer: int, *parts: tuple[int, int, int]) -> Request:
    return Request(PrefixHashes((), (), tokens), parts, answer, 0)


def run_to_end(replica: Replica) -> dict[Job, tuple[float, float]]:
    """Time of the first token and of the end of each job."""
    first, ended = {}, {}
    while replica.due is not None:
        now = replica.due
        started, done = replica.advance(now)
        first |= dict.fromkeys(started, now)
        ended |= dict.fromkeys(done, now)
    return {job: (first[job], ended[job]) for job in ended}


def test_a_prompt_takes_prefill_steps_and_an_answer_one_step_per_token():
    replica = Replica("r", replace(ACCELERATOR, cached_token_s=0.0))
    replica.add(request(5000, 11), 1.0)
    ((first, end),) = run_to_end(replica).values()
    prefill_s = 3 * ACCELERATOR.step_s + 5000 * ACCELERATOR.prefill_row_s
    assert first == pytest.approx(1.0 + prefill_s)
    assert end == pytest.approx(first + 10 * (ACCELERATOR.step_s + ACCELERATOR.decode_row_s))


def test_a_request_that_arrives_during_decoding_waits_for_one_step():
    replica = Replica("r", ACCELERATOR)
    replica.add(request(100, 1000), 0.0)
    replica.advance(replica.due)
    before = replica.due
    asked_at = replica.begun_at + 100.5 * 0.006
    replica.add(request(100, 10), asked_at)
    assert before - asked_at > 1
    assert 0 < replica.due - asked_at < 0.01


def test_a_cached_prefix_is_not_computed_again():
    replica = Replica("r", ACCELERATOR)
    for own in (2, 3):
        replica.add(request(3000, 5, (1, 0, 2000), (own, 2000, 3000)), 10.0 * own)
        (job,) = run_to_end(replica)
        assert job.hit == (2000 if own == 3 else 0)


def test_a_full_cache_evicts_the_least_recently_used_first():
    replica = Replica("r", replace(ACCELERATOR, cache_tokens=4000))
    hits = []
    for stream in (1, 2, 1, 3, 2):
        replica.add(request(1600, 5, (stream, 0, 1590)), 0.0)
        (job,) = run_to_end(replica)
        hits.append(job.hit)
    assert hits[:4] == [0, 0, 1584, 0]
    assert 0 < hits[4] < 1584  # the end of a prompt is evicted before its beginning


def test_no_more_sequences_run_than_there_are_slots():
    replica = Replica("r", replace(ACCELERATOR, slots=2))
    for _ in range(5):
        replica.add(request(10, 100), 0.0)
    while replica.due is not None:
        assert len(replica.prefilling) + len(replica.decoding) <= 2
        replica.advance(replica.due)
    assert replica.outstanding == 0


def test_each_turn_of_a_conversation_begins_with_the_previous_turns():
    turns = (Turn(300, 200, 0.0), Turn(300, 200, 5.0))
    session = Session(0.0, 7, (1, 1000), turns, converses=True)
    (_, first), (pause_s, second) = session.requests()
    assert (first.tokens, second.tokens, pause_s) == (1300, 1800, 5.0)
    assert second.hashes.keys[: len(first.hashes.keys)] == first.hashes.keys
    other = Session(0.0, 8, (1, 1000), turns[:1], converses=True)
    ((_, unrelated),) = other.requests()
    same = sum(a == b for a, b in zip(first.hashes.keys, unrelated.hashes.keys, strict=True))
    assert 1000 / 1.2 < first.hashes.ends[same - 1] <= 1000


def test_the_same_seed_gives_the_same_trace():
    mix = Mix(20, chats=1, documents=1, unshared=1)
    assert sessions(mix, seconds=5, seed=3) == sessions(mix, seconds=5, seed=3)
    assert sessions(mix, seconds=5, seed=3) != sessions(mix, seconds=5, seed=4)


SHARED = Scenario(
    "shared", ClusterSpec((ACCELERATOR,) * 8), Mix(8 * 9, chats=1, think_s=3), 12, 4, in_time_s=0.5
)
UNSHARED = Scenario(
    "unshared", ClusterSpec((ACCELERATOR,) * 8), Mix(8 * 14, unshared=1), 12, 4, 0.5
)


def first_p95(outcome: Outcome) -> float:
    return percentile(outcome.first_s, 0.95)


@pytest.mark.parametrize("ingresses", [1, 4])
def test_our_policy_is_much_faster_when_prompts_share_prefixes(ingresses):
    scenario = SHARED.with_ingresses(ingresses)
    ours = run(scenario, lambda _: Ours(ingresses))
    theirs = run(scenario, OTHERS["round robin"])
    assert first_p95(ours) < 0.5 * first_p95(theirs)
    assert ours.computed_tokens < 0.5 * theirs.computed_tokens


def test_our_policy_equals_power_of_two_when_prompts_share_nothing():
    ours = run(UNSHARED, lambda _: Ours(1))
    for name in ("power of two, by requests", "power of two, by tokens"):
        assert first_p95(ours) <= 1.1 * first_p95(run(UNSHARED, OTHERS[name]))


@pytest.mark.parametrize("make", [lambda _: Ours(2), *OTHERS.values()])
def test_every_request_is_answered_when_replicas_fail(make):
    """Requests of a failed replica are sent to another one."""
    scenario = everything(16, 4.0)
    trace = sessions(scenario.mix, seconds=4.0, seed=1)
    outcome = Outcome(0.0, 1e6)
    World(scenario.cluster, make, outcome=outcome, in_time_s=1.0).run(trace)
    sent = sum(len(session.turns) for session in trace)
    assert len(outcome.between_s) == sent
    assert len(outcome.first_s) == sent, "streams that continue elsewhere have begun before"
    assert sent < outcome.decisions < 2 * sent


def test_a_replica_is_busy_in_a_share_of_the_time_in_which_it_was_there() -> None:
    """Two replicas with more work than they can do; one fails, and its successor joins later."""
    cluster = ClusterSpec((ACCELERATOR,) * 2, fail_at_s=4.0, failing=1, replaced_after_s=4.0)
    scenario = Scenario("busy", cluster, Mix(60, unshared=1), 12, 2, 0.5)
    busy = run(scenario, OTHERS["round robin"]).busy
    assert len(busy) == 3 and all(0.95 < share < 1.1 for share in busy)


def test_moving_queued_requests_shortens_long_waits_when_replicas_join():
    late = late_replicas(120).with_ingresses(2)
    moving, staying = (run(late, lambda _, m=m: Ours(2, moves=m)) for m in (True, False))
    assert moving.moves > 5 and not staying.moves
    assert max(moving.first_s) < 0.7 * max(staying.first_s)
    assert len(moving.first_s) == len(staying.first_s), "each is answered once"


def test_figures_over_traces_are_means_of_the_results_of_different_traces():
    late = late_replicas(60).with_ingresses(2)
    runs = [run(late, lambda _: Ours(2), seed) for seed in (0, 1)]
    means = over_traces(late, lambda _: Ours(2), 2)
    longest = [max(outcome.first_s) for outcome in runs]
    assert longest[0] != longest[1] and means.longest_s == pytest.approx(sum(longest) / 2)
    page = routing_page([], [], (means, replace(means, longest_s=99.0)), "- a machine", 60.0)
    assert f"the longest wait from 99.0 s to {means.longest_s:.1f} s;" in " ".join(page.split())
