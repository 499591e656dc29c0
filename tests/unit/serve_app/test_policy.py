"""Which replica is chosen, by what is known of them."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.routing.policy import Load, RoutingPolicy, Rules
from serve_app.routing.prefixes import PrefixHashes, PrefixMemory, chain_of

IDLE = Load(slots=16, tokens_per_s=1000.0, cache_tokens=100_000)


def prompt(name: str, tokens: int = 400) -> PrefixHashes:
    """Of prompts with the same name the shorter begins the longer."""
    text = (f"{name} says: " * (4 * tokens))[: 4 * tokens]
    return chain_of(text.encode())


def busy(queued_tokens: int, **facts) -> Load:
    known = {"slots": 16, "tokens_per_s": 1000.0, "cache_tokens": 100_000, **facts}
    return Load(queued_tokens=queued_tokens, **known)


def policy(loads: dict[str, Load], *, seed: int = 0, rules: Rules | None = None) -> RoutingPolicy:
    made = RoutingPolicy(rules, random=Random(seed))
    for name, load in loads.items():
        made.admit(name)
        made.report(name, load, now=0.0)
    return made


def names(count: int) -> list[str]:
    return [f"r{number}" for number in range(count)]


def test_without_replicas_there_is_no_choice():
    assert RoutingPolicy().choose(prompt("a"), now=0.0) is None


def test_the_next_turn_goes_where_the_last_one_was():
    for seed in range(20):
        choices = policy(dict.fromkeys(names(8), IDLE), seed=seed)
        first = choices.choose(prompt("a", 400), now=0.0)
        for turn in range(1, 6):
            now = 10.0 * turn
            for name in names(8):
                choices.report(name, IDLE, now=now)
            assert choices.choose(prompt("a", 400 + 200 * turn), now=now) == first


def test_an_overloaded_holder_is_left():
    choices = policy(dict.fromkeys(names(3), IDLE))
    holder = choices.choose(prompt("a"), now=0.0)
    choices.report(holder, busy(20_000), now=1.0)
    assert choices.choose(prompt("a", 500), now=1.0) != holder


def test_a_holder_is_not_left_for_a_shorter_queue_than_the_prefix_is_worth():
    """To compute 400 tokens again takes 0.4 s; with `loyalty` 3 that is worth a wait of 1.2 s."""
    for queued, leaves in ((1000, False), (1600, True)):
        choices = policy(dict.fromkeys(names(3), IDLE))
        holder = choices.choose(prompt("a"), now=0.0)
        choices.report(holder, busy(queued), now=1.0)
        assert (choices.choose(prompt("a", 450), now=1.0) != holder) == leaves


def test_a_short_wait_is_no_reason_to_leave_even_where_little_is_held():
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


def test_a_replica_whose_slots_are_taken_is_avoided_though_its_queue_is_short():
    taken = busy(0, running=16, slots=16)
    queueing = busy(600, running=2, slots=16)
    assert policy({"taken": taken, "queueing": queueing}).choose(prompt("a"), now=0) == "queueing"


def test_a_replica_whose_memory_is_full_is_avoided():
    full = busy(100, running=4, waiting=1, memory=0.99)
    queueing = busy(600, running=4)
    assert policy({"full": full, "queueing": queueing}).choose(prompt("a"), now=0) == "queueing"


def test_how_often_turns_come_is_learned_where_answers_wait_for_slots():
    """Both let one wait for a slot; at one a turn comes every 0.1 s, at the other every 10 s."""
    loads = {name: busy(100, running=16, waiting=1) for name in ("quick", "slow")}
    choices = policy(loads)
    for second in range(1, 21):
        for name, started in (("quick", 10 * second), ("slow", second // 10)):
            report = busy(100, running=16, waiting=1, started=started)
            choices.report(name, report, now=float(second))
    counts = Counter(choices.choose(prompt(f"{n}"), now=20.0) for n in range(8))
    assert counts["quick"] == 8


def test_what_one_has_given_oneself_counts_before_it_is_reported():
    choices = policy(dict.fromkeys(names(4), IDLE))
    chosen = [choices.choose(prompt(f"{n}", 800), now=0.01 * n) for n in range(4)]
    assert sorted(chosen) == names(4)


def test_what_has_been_reported_is_not_counted_twice():
    choices = policy({"a": IDLE, "b": IDLE})
    first = choices.choose(prompt("a", 2000), now=0.0)
    other = "b" if first == "a" else "a"
    choices.report(first, busy(0), now=10.0)  # done with it
    choices.report(other, busy(900), now=10.0)
    assert choices.choose(prompt("c", 100), now=10.0) == first


def test_a_reported_queue_shrinks_as_time_passes():
    choices = policy({"old": busy(3000), "new": IDLE})
    choices.report("new", busy(1500), now=2.9)
    assert choices.choose(prompt("x"), now=2.9) == "old"


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.integers(2, 30))
def test_a_burst_on_stale_reports_does_not_herd(seed, count):
    """All reports are old and say the same; 20 prompts for each replica come at once."""
    choices = policy(dict.fromkeys(names(count), IDLE), seed=seed)
    chosen = Counter(choices.choose(prompt(f"{n}"), now=0.1) for n in range(20 * count))
    assert max(chosen.values()) <= 30
    assert len(chosen) == count


def test_several_ingresses_that_know_nothing_of_each_other_do_not_herd():
    loads = dict.fromkeys(names(32), IDLE) | {"r7": Load(slots=16, tokens_per_s=1500.0)}
    ingresses = [policy(loads, seed=seed) for seed in range(8)]
    chosen = Counter(
        each.choose(prompt(f"{n}/{number}"), now=0.01)
        for n in range(40)
        for number, each in enumerate(ingresses)
    )
    assert max(chosen.values()) <= 3 * 10  # ten for each on the average


def test_what_another_ingress_has_given_is_learned():
    choices = policy(dict.fromkeys(names(16), IDLE))
    choices.learn("r11", prompt("a"))
    assert choices.choose(prompt("a", 600), now=0.0) == "r11"


def test_a_popular_beginning_spreads_over_replicas():
    """One replica would need 40 s for the 400 different prompts behind the common system text."""
    choices = policy(dict.fromkeys(names(8), IDLE))
    system = "You are a helpful guide. " * 60
    asked = [chain_of(f"{system}{n} {n * n} {'?' * 400}".encode()) for n in range(400)]
    chosen = Counter(choices.choose(chain, now=0.001 * n) for n, chain in enumerate(asked))
    assert len(chosen) == 8
    assert max(chosen.values()) < 100


def test_the_dead_are_forgotten():
    choices = policy(dict.fromkeys(names(4), IDLE))
    holder = choices.choose(prompt("a"), now=0.0)
    choices.forget(holder)
    assert holder not in choices.replicas
    assert {choices.choose(prompt("a"), now=0.0) for _ in range(50)} <= choices.replicas
    choices.report(holder, IDLE, now=1.0)  # a report that was on its way
    choices.learn(holder, prompt("a"))
    assert holder not in choices.replicas


def test_replicas_leave_and_come_in_any_order():
    choices = policy(dict.fromkeys(names(6), IDLE))
    for name in ("r0", "r5", "r2"):
        choices.forget(name)
    choices.admit("r6")
    chosen = {choices.choose(prompt(f"{n}"), now=0.0) for n in range(40)}
    assert chosen == {"r1", "r3", "r4", "r6"} == choices.replicas


def test_a_replica_in_doubt_is_passed_over_until_it_reports():
    choices = policy(dict.fromkeys(names(2), IDLE))
    holder = choices.choose(prompt("a"), now=0.0)
    choices.doubt(holder, now=0.0)
    other = choices.choose(prompt("b"), now=0.1)
    assert other != holder
    assert choices.choose(prompt("a"), now=0.1) == other
    choices.report(holder, IDLE, now=0.2)
    choices.report(other, busy(5000), now=0.2)
    assert choices.choose(prompt("c"), now=0.2) == holder


def test_a_replica_that_has_been_silent_is_passed_over():
    choices = policy(dict.fromkeys(names(2), IDLE))
    choices.report("r1", busy(4000), now=60.0)
    assert choices.choose(prompt("a"), now=60.0) == "r1"


def test_those_to_avoid_are_chosen_only_where_there_is_no_other():
    choices = policy(dict.fromkeys(names(3), IDLE))
    holder = choices.choose(prompt("a"), now=0.0)
    others = choices.replicas - {holder}
    assert choices.choose(prompt("a"), now=0.0, avoid=frozenset({holder})) in others
    assert choices.choose(prompt("a"), now=0.0, avoid=others) == holder
    for name in names(3):
        choices.doubt(name, now=0.0)
    assert choices.choose(prompt("a"), now=0.0, avoid=others) == holder
    assert choices.choose(prompt("a"), now=0.0, avoid=choices.replicas) in names(3)


def test_a_replica_without_reports_is_used():
    choices = policy({"busy": busy(9000)})
    choices.admit("new")
    assert choices.choose(prompt("a"), now=0.0) == "new"


def test_of_a_thousand_replicas_few_are_looked_at():
    looked: list[str] = []

    class Memory(PrefixMemory):
        def held_tokens(self, replica, chain):
            looked.append(replica)
            return super().held_tokens(replica, chain)

    choices = RoutingPolicy(memory=Memory(), random=Random(1))
    for name in names(1000):
        choices.admit(name)
        choices.report(name, IDLE, now=0.0)
    chosen = Counter(choices.choose(prompt(f"{n}"), now=0.0) for n in range(3000))
    assert len(looked) < 3000 * 10
    assert max(chosen.values()) <= 8
    assert {choices.choose(prompt(f"{n}", 500), now=4.0) for n in range(100)} <= set(chosen)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("adfrc"), st.integers(0, 5)), max_size=80))
def test_whoever_is_chosen_is_there(events):
    """Replicas come and go, report and are doubted, in any order."""
    choices, now = RoutingPolicy(random=Random(2)), 0.0
    for kind, number in events:
        name, now = f"r{number}", now + 0.1
        if kind == "a" and name not in choices.replicas:
            choices.admit(name)
        elif kind == "f" and name in choices.replicas:
            choices.forget(name)
        elif kind == "r":
            choices.report(name, busy(100 * number), now=now)
        elif kind == "d":
            choices.doubt(name, now=now)
        chosen = choices.choose(prompt(f"{number}"), now=now)
        assert chosen in choices.replicas if choices.replicas else chosen is None


def waiting(count: int, *, tokens: int = 1000, load: Load = IDLE) -> RoutingPolicy:
    """A policy that has given tasks "0", "1", ... to the only replica that there was, "old"."""
    choices = policy({"old": load})
    for number in range(count):
        assert choices.choose(prompt(f"{number}", tokens), now=0.0, task=f"{number}") == "old"
    return choices


def moved(choices: RoutingPolicy, tasks, *, now: float = 1.0) -> list[str | None]:
    return [choices.better(f"{task}", now=now) for task in tasks]


def test_those_that_wait_stay_where_there_is_nobody_else():
    assert moved(waiting(20), range(20)) == [None] * 20
    assert waiting(1).better("unknown", now=1.0) is None


@pytest.mark.parametrize("asked", [range(30), range(29, -1, -1)])
def test_of_those_that_wait_so_many_go_to_a_newcomer_that_both_have_about_as_much(asked):
    choices = waiting(30)
    choices.admit("new")
    choices.report("new", IDLE, now=1.0)
    gone = [n for n in asked if moved(choices, [n]) == ["new"]]
    assert 8 <= len(gone) <= 15 and 0 not in gone
    assert moved(choices, asked) == [None] * 30, "nobody moves to and fro"


def test_who_waited_behind_one_that_has_left_is_nearer_to_its_turn():
    """Two prompts, of three and of one second, and one of a tenth behind them."""
    choices = policy({"old": IDLE})
    for name, tokens in (("long", 3000), ("next", 1000), ("last", 100)):
        choices.choose(prompt(name, tokens), now=0.0, task=name)
    before = {name: choices._tickets[name].tokens for name in ("long", "next", "last")}
    assert before == {"long": 3000, "next": 4000, "last": 4100}
    choices.admit("new")
    assert choices.better("next", now=0.0) == "new"
    assert {name: choices._tickets[name].tokens for name in ("long", "last")} == {
        "long": 3000,
        "last": 3100,
    }


def test_two_newcomers_share_what_waits():
    choices = waiting(60)
    for name in ("new", "newer"):
        choices.admit(name)
    where = Counter(moved(choices, reversed(range(60))))
    assert min(where["new"], where["newer"]) > 10 and where[None] > 10


def test_what_has_been_computed_of_what_stood_before_a_task_counts():
    """Twenty prompts of a second each: the last one's turn comes after nineteen."""
    for done, leaves in ((0, True), (10_000, True), (18_500, False)):
        choices = waiting(20)
        choices.admit("new")
        choices.report("old", busy(20_000 - done, computed_tokens=done), now=1.0)
        assert (moved(choices, [19]) == ["new"]) == leaves, done


def test_waiting_for_slots_is_waiting_too():
    full = busy(0, running=16, waiting=1, started=100)
    choices = waiting(5, tokens=10, load=full)
    choices.admit("new")
    assert moved(choices, [4]) == ["new"]
    choices = waiting(5, tokens=10, load=full)
    choices.admit("new")
    choices.report("old", busy(0, running=16, waiting=1, started=105), now=1.0)
    assert moved(choices, [4]) == [None], "its turn has come"


def test_a_prefix_that_is_held_where_a_task_waits_is_worth_a_wait():
    """All but 100 of 8000 tokens are there; elsewhere they would take eight seconds."""
    for queued, leaves in ((7000, False), (30_000, True)):
        choices = policy({"old": IDLE})
        choices.choose(prompt("a", 8000), now=0.0)
        choices.report("old", busy(queued, computed_tokens=8000), now=1.0)
        choices.choose(prompt("a", 8100), now=1.0, task="next")
        choices.admit("new")
        assert (choices.better("next", now=1.0) == "new") == leaves, queued


def test_nobody_moves_to_one_that_is_avoided_in_doubt_or_silent():
    choices = waiting(30)
    choices.admit("new")
    assert choices.better("29", now=1.0, avoid=frozenset({"new"})) is None
    choices.doubt("new", now=1.0)
    assert choices.better("29", now=1.0) is None
    choices.report("new", IDLE, now=1.0)
    choices.report("old", busy(30_000), now=50.0)
    assert choices.better("29", now=50.0) is None
    choices.report("new", IDLE, now=50.0)
    assert choices.better("29", now=50.0) == "new"


def test_who_waits_at_a_replica_that_is_gone_is_no_longer_moved():
    choices = waiting(30)
    choices.admit("new")
    choices.forget("old")
    assert moved(choices, range(30)) == [None] * 30


def test_of_those_that_wait_so_many_are_remembered_and_no_more(monkeypatch):
    monkeypatch.setattr("serve_app.routing.policy.MOST_TICKETS", 20)
    choices = waiting(30)
    choices.admit("new")
    assert moved(choices, range(10)) == [None] * 10
    assert len(choices._tickets) == 20 and "new" in moved(choices, range(20, 30))
