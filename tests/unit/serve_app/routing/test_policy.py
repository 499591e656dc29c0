"""The routing policy: which replica is chosen for which load and cached prefixes."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.messages.replica_load import PrefixHashes, ReplicaLoad
from serve_app.routing.policy import PolicyRules, RoutingPolicy
from serve_app.routing.prefix_memory import PrefixMemory, hash_prefixes

IDLE = ReplicaLoad(slots=16, tokens_per_s=1000.0, cache_tokens=100_000)


def prompt(name: str, tokens: int = 400) -> PrefixHashes:
    """A shorter prompt with the same name is a prefix of a longer one."""
    text = (f"{name} says: " * (4 * tokens))[: 4 * tokens]
    return hash_prefixes(text.encode())


def busy(queued_tokens: int, **facts) -> ReplicaLoad:
    known = {"slots": 16, "tokens_per_s": 1000.0, "cache_tokens": 100_000, **facts}
    return ReplicaLoad(queued_tokens=queued_tokens, **known)


def policy(
    loads: dict[str, ReplicaLoad], *, seed: int = 0, rules: PolicyRules | None = None
) -> RoutingPolicy:
    made = RoutingPolicy(rules, random=Random(seed))
    for name, load in loads.items():
        made.add(name)
        made.report(name, load, now=0.0)
    return made


def names(count: int) -> list[str]:
    return [f"r{number}" for number in range(count)]


def test_the_next_turn_is_sent_to_the_same_replica():
    for seed in range(20):
        choices = policy(dict.fromkeys(names(8), IDLE), seed=seed)
        first = choices.choose(prompt("a", 400), now=0.0)
        for turn in range(1, 6):
            now = 10.0 * turn
            for name in names(8):
                choices.report(name, IDLE, now=now)
            assert choices.choose(prompt("a", 400 + 200 * turn), now=now) == first


@pytest.mark.parametrize("speed", [50.0, 100.0, 400.0, 1000.0])
@pytest.mark.parametrize("running", [0, 1])
def test_the_next_turn_is_sent_to_the_same_replica_although_reports_are_late(speed, running):
    """The last report is from before the first turn or from within it. Each turn takes as long as
    the replica says, and the next one begins half a second later."""
    idle = ReplicaLoad(slots=16, tokens_per_s=speed, cache_tokens=100_000)
    for seed in range(20):
        choices = policy(dict.fromkeys(names(2), idle), seed=seed)
        first = choices.choose(prompt("a", 50), now=1.0)
        choices.report(first, replace(idle, running=running), now=1.05 if running else 1.0)
        for turn in range(1, 4):
            now = 1.0 + (0.5 + 50 / speed) * turn
            assert choices.choose(prompt("a", 50 + 20 * turn), now=now) == first


def test_another_replica_is_chosen_when_the_holder_is_overloaded():
    choices = policy(dict.fromkeys(names(3), IDLE))
    holder = choices.choose(prompt("a"), now=0.0)
    choices.report(holder, busy(20_000), now=1.0)
    assert choices.choose(prompt("a", 500), now=1.0) != holder


def test_the_holder_is_kept_while_its_queue_costs_less_than_recomputing_the_prefix():
    """Recomputing 400 tokens takes 0.4 s, which counts three times: a wait of 1.2 s is accepted."""
    for queued, leaves in ((1100, False), (1300, True)):
        choices = policy(dict.fromkeys(names(3), IDLE))
        holder = choices.choose(prompt("a"), now=0.0)
        choices.report(holder, busy(queued), now=1.0)
        assert (choices.choose(prompt("a", 450), now=1.0) != holder) == leaves


def test_the_holder_is_kept_for_a_short_wait_even_if_it_holds_little():
    for queued, leaves in ((80, False), (150, False), (300, True)):
        choices = policy(dict.fromkeys(names(3), IDLE))
        holder = choices.choose(prompt("a", 40), now=0.0)
        choices.report(holder, busy(queued), now=1.0)
        assert (choices.choose(prompt("a", 40), now=1.0) != holder) == leaves


def test_work_is_counted_in_tokens_not_in_requests():
    many_short = busy(200, running=8, waiting=4)
    one_long = busy(12_000, running=1, waiting=0)
    choices = policy({"short": many_short, "long": one_long})
    assert choices.choose(prompt("a"), now=0.0) == "short"


def test_a_faster_replica_takes_more():
    fast = busy(3000, tokens_per_s=4000.0)
    slow = busy(2000, tokens_per_s=1000.0)
    assert policy({"fast": fast, "slow": slow}).choose(prompt("a"), now=0.0) == "fast"


@pytest.mark.parametrize(
    "full", [busy(0, running=16), busy(100, running=4, waiting=1, memory=0.99)]
)
def test_a_replica_without_slots_or_memory_is_avoided_though_its_queue_is_short(full):
    queueing = busy(600, running=4)
    assert policy({"full": full, "queueing": queueing}).choose(prompt("a"), now=0) == "queueing"


def test_the_wait_for_a_slot_is_not_added_to_that_for_the_queue():
    """A slot is free in a second; queue and running requests take as long, at the same time."""
    taken = busy(500, running=16, slots=16)
    queueing = busy(1400, running=2, slots=16)
    assert policy({"taken": taken, "queueing": queueing}).choose(prompt("a"), now=0) == "taken"


def test_the_rate_of_starts_is_measured_while_requests_wait_for_slots():
    """Both have a request that waits for a slot; one starts a request every 0.1 s, the other every
    10 s."""
    loads = {name: busy(100, running=16, waiting=1) for name in ("quick", "slow")}
    choices = policy(loads)
    for second in range(1, 21):
        for name, started in (("quick", 10 * second), ("slow", second // 10)):
            report = busy(100, running=16, waiting=1, started=started)
            choices.report(name, report, now=float(second))
    counts = Counter(choices.choose(prompt(f"{n}"), now=20.0) for n in range(8))
    assert counts["quick"] == 8


def test_the_rate_of_starts_is_not_measured_while_slots_are_free():
    """Both start ten requests a second when full, but one has not been full for a long time."""
    full = {"running": 16, "waiting": 20}
    choices = policy(dict.fromkeys(("steady", "rested"), busy(0, **full)))
    for now, steady, rested in ((1.0, 9, 10), (2.0, 18, None), (99.0, 891, 10), (100.0, 900, 20)):
        choices.report("steady", busy(0, **full, started=steady), now=now)
        known = busy(0) if rested is None else busy(0, **full, started=rested)
        choices.report("rested", known, now=now)
    assert choices.choose(prompt("a"), now=100.0) == "rested"


def test_requests_assigned_here_count_before_the_replica_reports_them():
    choices = policy(dict.fromkeys(names(4), IDLE))
    chosen = [choices.choose(prompt(f"{n}", 800), now=0.01 * n) for n in range(4)]
    assert sorted(chosen) == names(4)


def test_requests_included_in_a_report_are_not_counted_twice():
    choices = policy({"a": IDLE, "b": IDLE})
    first = choices.choose(prompt("a", 2000), now=0.0)
    other = "b" if first == "a" else "a"
    choices.report(first, busy(0), now=10.0)  # done with it
    choices.report(other, busy(900), now=10.0)
    assert choices.choose(prompt("c", 100), now=10.0) == first


def test_the_longer_a_prompt_the_later_a_report_includes_it():
    """The replica tokenises 100,000 tokens for half a second; its report of 0.3 s lacks them."""
    for at, same in ((0.3, False), (0.7, True)):
        choices = policy({"a": IDLE, "b": busy(900)})
        assert choices.choose(prompt("a", 100_000), now=0.0) == "a"
        choices.report("a", IDLE, now=at)
        choices.report("b", busy(900), now=at)
        assert (choices.choose(prompt("c", 100), now=at) == "a") == same, at


def test_a_reported_queue_shrinks_as_time_passes():
    choices = policy({"old": busy(3000), "new": IDLE})
    choices.report("new", busy(1500), now=2.9)
    assert choices.choose(prompt("x"), now=2.9) == "old"


def test_an_assigned_prompt_shrinks_only_from_the_time_of_its_assignment():
    """At 1.5 s, "a" has computed half of the prompt that it got at 1.0 s; its report is older."""
    for queued, other in ((400, True), (600, False)):
        choices = policy({"a": IDLE, "b": busy(1500)})
        assert choices.choose(prompt("a", 1000), now=1.0) == "a"
        choices.report("b", busy(queued), now=1.5)
        assert (choices.choose(prompt("c", 10), now=1.5) == "b") == other


def test_a_replica_that_has_measured_no_speed_counts_as_fast_as_the_others():
    for queued, unknown in ((700, False), (900, True)):
        choices = policy({"a": busy(800), "b": busy(queued, tokens_per_s=None)})
        for _ in range(9):
            choices.report("a", busy(800), now=0.0)
        assert (choices.choose(prompt("c"), now=0.0) == "a") == unknown


@settings(max_examples=15)
@given(st.integers(0, 1000), st.integers(2, 30))
def test_a_burst_on_stale_reports_is_spread_over_all_replicas(seed, count):
    """All reports are old and equal; 20 prompts for each replica arrive at once."""
    choices = policy(dict.fromkeys(names(count), IDLE), seed=seed)
    chosen = Counter(choices.choose(prompt(f"{n}"), now=0.1) for n in range(20 * count))
    assert max(chosen.values()) <= 30
    assert len(chosen) == count


def test_independent_ingresses_spread_their_requests():
    loads = dict.fromkeys(names(32), IDLE) | {"r7": ReplicaLoad(slots=16, tokens_per_s=1500.0)}
    ingresses = [policy(loads, seed=seed) for seed in range(8)]
    chosen = Counter(
        each.choose(prompt(f"{n}/{number}"), now=0.01)
        for n in range(40)
        for number, each in enumerate(ingresses)
    )
    assert max(chosen.values()) <= 3 * 10  # the mean is ten for each replica


def test_prompts_sent_by_another_ingress_are_recorded():
    choices = policy(dict.fromkeys(names(16), IDLE))
    choices.record_prompt("r11", prompt("a"))
    assert choices.choose(prompt("a", 600), now=0.0) == "r11"


def test_requests_with_a_popular_prefix_are_spread():
    """One replica would need 40 s for the 400 different prompts after the common system text."""
    choices = policy(dict.fromkeys(names(8), IDLE))
    system = "You are a helpful guide. " * 60
    asked = [hash_prefixes(f"{system}{n} {n * n} {'?' * 400}".encode()) for n in range(400)]
    chosen = Counter(choices.choose(hashes, now=0.001 * n) for n, hashes in enumerate(asked))
    assert len(chosen) == 8
    assert max(chosen.values()) < 100


def test_removed_replicas_are_not_chosen():
    choices = policy(dict.fromkeys(names(4), IDLE))
    holder = choices.choose(prompt("a"), now=0.0)
    choices.remove(holder)
    assert holder not in choices.replicas
    assert choices._memory.held_tokens(holder, prompt("a")) == 0
    assert {choices.choose(prompt("a"), now=0.0) for _ in range(50)} <= choices.replicas
    choices.report(holder, IDLE, now=1.0)  # a late report
    choices.record_prompt(holder, prompt("a"))
    assert holder not in choices.replicas


def test_replicas_are_added_and_removed_in_any_order():
    choices = policy(dict.fromkeys(names(6), IDLE))
    for name in ("r0", "r5", "r2"):
        choices.remove(name)
    choices.add("r6")
    chosen = {choices.choose(prompt(f"{n}"), now=0.0) for n in range(40)}
    assert chosen == {"r1", "r3", "r4", "r6"} == choices.replicas


def test_a_replica_in_doubt_is_skipped_until_it_reports():
    choices = policy(dict.fromkeys(names(2), IDLE))
    holder = choices.choose(prompt("a"), now=0.0)
    choices.doubt(holder, now=0.0)
    other = choices.choose(prompt("b"), now=0.1)
    assert other != holder
    assert choices.choose(prompt("a"), now=0.1) == other
    choices.report(holder, IDLE, now=0.2)
    choices.report(other, busy(5000), now=0.2)
    assert choices.choose(prompt("c"), now=0.2) == holder


def test_a_replica_without_recent_reports_is_skipped():
    choices = policy(dict.fromkeys(names(2), IDLE))
    choices.report("r1", busy(4000), now=60.0)
    assert choices.choose(prompt("a"), now=60.0) == "r1"


def test_avoided_replicas_are_chosen_only_if_there_is_no_other():
    choices = policy(dict.fromkeys(names(3), IDLE))
    holder = choices.choose(prompt("a"), now=0.0)
    others = choices.replicas - {holder}
    assert choices.choose(prompt("a"), now=0.0, avoid=frozenset({holder})) in others
    assert choices.choose(prompt("a"), now=0.0, avoid=others) == holder
    for name in names(3):
        choices.doubt(name, now=0.0)
    assert choices.choose(prompt("a"), now=0.0, avoid=others) == holder
    assert choices.choose(prompt("a"), now=0.0, avoid=choices.replicas) in names(3)


def test_of_avoided_replicas_one_with_a_working_connection_is_chosen():
    choices = policy(dict.fromkeys(names(2), IDLE))
    choices.doubt("r0", now=0.0)
    for name in "abcdefgh":
        assert choices.choose(prompt(name), now=0.0, avoid=choices.replicas) == "r1"


def test_replicas_that_are_unable_are_chosen_only_if_there_is_not_even_an_avoided_one():
    choices = policy(dict.fromkeys(names(3), IDLE))
    holder = choices.choose(prompt("a"), now=0.0)
    assert holder is not None
    others = choices.replicas - {holder}
    for avoid in (frozenset(), others, frozenset({holder}), choices.replicas):
        chosen = choices.choose(prompt("a"), now=0.0, avoid=avoid, unable=frozenset({holder}))
        assert chosen in others
    assert choices.choose(prompt("a"), now=0.0, unable=choices.replicas) in choices.replicas


def test_a_replica_without_reports_is_used():
    choices = policy({"busy": busy(9000)})
    choices.add("new")
    assert choices.choose(prompt("a"), now=0.0) == "new"


def test_policies_of_several_models_share_one_budget_of_prefixes():
    memory = PrefixMemory(max_entries=2 * len(prompt("a").keys))
    one, other = (RoutingPolicy(memory=memory, random=Random(1)) for _ in range(2))
    for choices, model in ((one, "one"), (other, "other")):
        for name in names(3):
            choices.add(f"{model} {name}")
            choices.report(f"{model} {name}", IDLE, now=0.0)
    first = one.choose(prompt("a"), now=0.0)
    assert other.choose(prompt("a"), now=0.0) in other.replicas, "also if the keys were equal"
    assert one.choose(prompt("a"), now=1.0) == first
    for name in "bcd":
        other.choose(prompt(name), now=1.0)
    assert memory.held_tokens(first, prompt("a")) == 0, "the others are more recent"


def test_few_of_a_thousand_replicas_are_examined():
    looked: list[str] = []

    class Memory(PrefixMemory):
        def held_tokens(self, replica, hashes):
            looked.append(replica)
            return super().held_tokens(replica, hashes)

    choices = RoutingPolicy(memory=Memory(), random=Random(1))
    for name in names(1000):
        choices.add(name)
        choices.report(name, IDLE, now=0.0)
    chosen = Counter(choices.choose(prompt(f"{n}"), now=0.0) for n in range(3000))
    assert len(looked) < 3000 * 10
    assert max(chosen.values()) <= 8
    assert {choices.choose(prompt(f"{n}", 500), now=4.0) for n in range(100)} <= set(chosen)


@given(st.lists(st.tuples(st.sampled_from("adfrc"), st.integers(0, 5)), max_size=80))
def test_only_existing_replicas_are_chosen(events):
    """Replicas are added, removed, reported and doubted in any order."""
    choices, now = RoutingPolicy(random=Random(2)), 0.0
    for kind, number in events:
        name, now = f"r{number}", now + 0.1
        if kind == "a" and name not in choices.replicas:
            choices.add(name)
        elif kind == "f" and name in choices.replicas:
            choices.remove(name)
        elif kind == "r":
            choices.report(name, busy(100 * number), now=now)
        elif kind == "d":
            choices.doubt(name, now=now)
        chosen = choices.choose(prompt(f"{number}"), now=now)
        assert chosen in choices.replicas if choices.replicas else chosen is None


def queued(count: int, *, tokens: int = 1000, load: ReplicaLoad = IDLE) -> RoutingPolicy:
    """A policy that has assigned requests "0", "1", … to its only replica, "old"."""
    choices = policy({"old": load})
    for number in range(count):
        assert choices.choose(prompt(f"{number}", tokens), now=0.0, request=f"{number}") == "old"
    return choices


def moved(choices: RoutingPolicy, tasks, *, now: float = 1.0) -> list[str | None]:
    return [choices.choose_earlier(f"{task}", now=now) for task in tasks]


def test_queued_requests_stay_when_there_is_no_other_replica():
    assert moved(queued(20), range(20)) == [None] * 20
    assert queued(1).choose_earlier("unknown", now=1.0) is None


def test_a_request_moves_only_to_a_replica_that_starts_it_in_half_the_time():
    """It starts in ten seconds, after nine other prompts of a second each."""
    for queue, leaves in ((5000, False), (3000, True)):
        choices = queued(10)
        choices.add("new")
        choices.report("new", busy(queue), now=0.0)
        assert (moved(choices, [9], now=0.0) == ["new"]) == leaves, queue


@pytest.mark.parametrize("asked", [range(30), range(29, -1, -1)])
def test_a_new_replica_gets_about_half_of_the_queue(asked):
    choices = queued(30)
    choices.add("new")
    choices.report("new", IDLE, now=1.0)
    gone = [n for n in asked if moved(choices, [n]) == ["new"]]
    assert 8 <= len(gone) <= 15 and 0 not in gone
    assert moved(choices, asked) == [None] * 30, "no request moves back"


def test_a_request_stays_when_most_of_what_was_ahead_of_it_is_computed():
    """20 of 30 seconds have passed; requests that arrived later wait as long as before."""
    choices = queued(30)
    choices.report("old", busy(10_000, computed_tokens=20_000), now=20.0)
    choices.add("new")
    assert moved(choices, [20, 29], now=20.0) == [None, "new"]


def test_requests_behind_a_moved_one_advance():
    """Prompts of three seconds, one second and a tenth of a second, in this order."""
    choices = policy({"old": IDLE})
    for name, tokens in (("long", 3000), ("next", 1000), ("last", 100)):
        choices.choose(prompt(name, tokens), now=0.0, request=name)
    before = {name: choices._positions[name].tokens for name in ("long", "next", "last")}
    assert before == {"long": 3000, "next": 4000, "last": 4100}
    choices.add("new")
    assert choices.choose_earlier("next", now=0.0) == "new"
    assert {name: choices._positions[name].tokens for name in ("long", "last")} == {
        "long": 3000,
        "last": 3100,
    }


@pytest.mark.parametrize("refused", [True, False])
def test_a_replica_does_not_hold_the_prompt_of_a_request_that_was_moved_or_refused(refused):
    choices = policy({"old": IDLE})
    choices.choose(prompt("a", 400), now=0.0)  # is computed and stays
    choices.choose(prompt("b", 100_000), now=0.0)
    choices.choose(prompt("a", 40_000), now=0.0, request="long")
    choices.add("new")
    if refused:
        again = choices.choose(
            prompt("a", 40_000), now=0.0, avoid=frozenset({"old"}), request="long"
        )
    else:
        again = choices.choose_earlier("long", now=0.0)
    assert again == "new"
    held = {name: choices._memory.held_tokens(name, prompt("a", 40_000)) for name in ("old", "new")}
    assert 350 <= held["old"] <= 400 and held["new"] > 35_000


def test_two_new_replicas_share_the_queue():
    choices = queued(60)
    for name in ("new", "newer"):
        choices.add(name)
    where = Counter(moved(choices, reversed(range(60))))
    assert min(where["new"], where["newer"]) > 10 and where[None] > 10


def test_work_done_since_the_assignment_shortens_the_estimated_wait():
    """Twenty prompts of one second each: the last one starts after nineteen."""
    for done, leaves in ((0, True), (10_000, True), (18_500, False)):
        choices = queued(20)
        choices.add("new")
        choices.report("old", busy(20_000 - done, computed_tokens=done), now=1.0)
        assert (moved(choices, [19]) == ["new"]) == leaves, done


def test_requests_that_wait_for_slots_are_moved_too():
    full = busy(0, running=16, waiting=1, started=100)
    choices = queued(5, tokens=10, load=full)
    choices.add("new")
    assert moved(choices, [4]) == ["new"]
    choices = queued(5, tokens=10, load=full)
    choices.add("new")
    choices.report("old", busy(0, running=16, waiting=1, started=105), now=1.0)
    assert moved(choices, [4]) == [None], "it starts now"


def test_a_request_whose_prefix_is_cached_is_moved_only_from_a_long_queue():
    """All but 100 of 8000 tokens are cached; another replica would need eight seconds."""
    for queued, leaves in ((7000, False), (30_000, True)):
        choices = policy({"old": IDLE})
        choices.choose(prompt("a", 8000), now=0.0)
        choices.report("old", busy(queued, computed_tokens=8000), now=1.0)
        choices.choose(prompt("a", 8100), now=1.0, request="next")
        choices.add("new")
        assert (choices.choose_earlier("next", now=1.0) == "new") == leaves, queued


def test_no_request_moves_to_a_replica_that_is_avoided_in_doubt_or_silent():
    choices = queued(30)
    choices.add("new")
    assert choices.choose_earlier("29", now=1.0, avoid=frozenset({"new"})) is None
    choices.doubt("new", now=1.0)
    assert choices.choose_earlier("29", now=1.0) is None
    choices.report("new", IDLE, now=1.0)
    choices.report("old", busy(30_000), now=50.0)
    assert choices.choose_earlier("29", now=50.0) is None
    choices.report("new", IDLE, now=50.0)
    assert choices.choose_earlier("29", now=50.0) == "new"


def test_requests_of_a_removed_replica_are_not_moved():
    choices = queued(30)
    choices.add("new")
    choices.remove("old")
    assert moved(choices, range(30)) == [None] * 30


def test_the_number_of_remembered_queue_positions_is_bounded(monkeypatch):
    monkeypatch.setattr("serve_app.routing.policy.MAX_QUEUE_POSITIONS", 20)
    choices = queued(30)
    choices.add("new")
    assert moved(choices, range(10)) == [None] * 10
    assert len(choices._positions) == 20 and "new" in moved(choices, range(20, 30))
