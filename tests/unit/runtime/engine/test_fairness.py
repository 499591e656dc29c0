"""The order in which a fair queue serves tenants, and the shares of a bounded one."""

import random
from collections import Counter, deque

from runtime.engine.fairness import FairQueue, PriorityQueue, may_enter


def queue_of(*items: tuple[str, int]) -> FairQueue[tuple[str, int]]:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for item in items:
        queue.add(item[0], item)
    return queue


def served(queue: FairQueue[tuple[str, int]], running: Counter[str]) -> tuple[str, int]:
    tenant, item = next(queue.in_turn(running))
    assert item[0] == tenant
    queue.serve(tenant, item)
    return item


def test_tenants_take_turns_and_one_tenant_s_items_keep_their_order() -> None:
    queue = queue_of(("a", 1), ("a", 2), ("a", 3), ("b", 1), ("c", 1), ("b", 2))
    order = [("a", 1), ("b", 1), ("c", 1), ("a", 2), ("b", 2), ("a", 3)]
    assert list(queue) == order
    assert [served(queue, Counter()) for _ in order] == order
    assert len(queue) == 0


def test_tenants_with_fewer_running_items_come_first() -> None:
    queue = queue_of(("a", 1), ("a", 2), ("b", 1), ("b", 2))
    order = [item for _, item in queue.in_turn({"a": 2, "b": 1})]
    assert order == [("b", 1), ("a", 1), ("b", 2), ("a", 2)]


def test_removing_an_item_does_not_end_the_tenants_turn() -> None:
    queue = queue_of(("a", 1), ("a", 2), ("b", 1))
    queue.remove("a", ("a", 1))
    assert list(queue) == [("a", 2), ("b", 1)]


def test_a_returning_tenant_has_its_turn_after_the_others() -> None:
    queue = queue_of(("a", 1), ("b", 1), ("b", 2))
    assert served(queue, Counter()) == ("a", 1)
    queue.add("a", ("a", 2))
    assert list(queue) == [("b", 1), ("a", 2), ("b", 2)]


def test_a_tenant_without_items_keeps_no_turn() -> None:
    queue = queue_of(("a", 1), ("b", 1))
    queue.remove("a", ("a", 1))
    queue.add("a", ("a", 2))
    assert list(queue) == [("b", 1), ("a", 2)]


def test_items_may_be_served_or_skipped_while_the_queue_is_iterated() -> None:
    queue = queue_of(("a", 1), ("a", 2), ("b", 1), ("b", 2))
    seen = []
    for tenant, item in queue.in_turn({}):
        seen.append(item)
        if item != ("a", 1):
            queue.serve(tenant, item)
    assert seen == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert list(queue) == [("a", 1)]


def test_a_tenant_without_running_items_waits_for_at_most_one_item_of_each_other_tenant() -> None:
    r = random.Random(1)
    overtaken_by_others = 0
    for _ in range(200):
        queue: FairQueue[tuple[str, int]] = FairQueue()
        running: Counter[str] = Counter()
        at_work: deque[str] = deque()
        overtakes: dict[str, Counter[str]] = {}
        for number in range(r.randint(10, 80)):
            tenant = r.choice("aaaaaabcd")
            queue.add(tenant, (tenant, number))
            overtakes.setdefault(tenant, Counter())
            while at_work and r.random() < 0.4:
                at_work.rotate(r.randrange(len(at_work)))
                running[at_work.popleft()] -= 1
            while len(at_work) < 3 and len(queue) and r.random() < 0.7:
                chosen, _ = served(queue, running)
                running[chosen] += 1
                at_work.append(chosen)
                overtakes.pop(chosen, None)
                if queue.count(chosen):
                    overtakes[chosen] = Counter()
                for other, counts in overtakes.items():
                    if other == chosen or running[other]:
                        counts.clear()
                        continue
                    counts[chosen] += 1
                    overtaken_by_others += 1
                    assert counts[chosen] == 1, (other, chosen)
    assert overtaken_by_others > 100


def test_lower_priority_numbers_come_first_and_tenants_take_turns_within_them() -> None:
    queue: PriorityQueue[str] = PriorityQueue()
    for item, priority in (("a1", 0), ("a2", 0), ("b1", 0), ("c1", 5), ("a3", -1), ("b2", -1)):
        queue.add(item[0], item, priority)
    order = ["a3", "b2", "a1", "b1", "a2", "c1"]
    assert (list(queue), len(queue)) == (order, 6)
    running = [item for _, item in queue.in_turn({"a": 1})]
    assert running == ["b2", "a3", "b1", "a1", "a2", "c1"]
    seen = []
    for tenant, item in queue.in_turn({}):
        seen.append(item)
        queue.serve(tenant, item, {"a3": -1, "b2": -1, "c1": 5}.get(item, 0))
    assert (seen, list(queue), len(queue)) == (order, [], 0)


def filled_by_one(limit: int, *, others: int = 0, reserved: int = 0) -> int:
    own = 0
    while may_enter(own, own + others, limit, reserved=reserved):
        own += 1
    return own


def test_items_of_a_priority_count_as_served_in_the_next_one() -> None:
    queue: PriorityQueue[str] = PriorityQueue()
    for tenant, item, priority in (("a", "a1", 0), ("a", "a2", 1), ("b", "b1", 1)):
        queue.add(tenant, item, priority)
    assert list(queue) == ["a1", "b1", "a2"]


def test_a_single_tenant_fills_its_reserved_places_and_half_of_the_others() -> None:
    assert filled_by_one(512) == 256
    assert filled_by_one(16 + 512, reserved=16) == 16 + 256
    assert filled_by_one(16, reserved=16) == 16
    assert filled_by_one(1) == 1


def test_later_tenants_find_free_places() -> None:
    first = filled_by_one(512)
    second = filled_by_one(512, others=first)
    third = filled_by_one(512, others=first + second)
    assert (first, second, third) == (256, 128, 64)
    assert not may_enter(0, 512, 512, reserved=16)
