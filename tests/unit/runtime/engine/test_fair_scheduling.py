"""The scheduler admits tenants in turn, those with the fewest running sequences first."""

import random
from collections import Counter, deque

from runtime.engine.request import GenerationRequest, ImageSpan, ResumeState, StopRules
from runtime.engine.scheduler import Scheduler
from runtime.engine.sequence import Sequence, SequenceState
from runtime.kv.cache_kinds import Full
from runtime.kv.cache_manager import KVCacheManager
from tests.unit.runtime.engine.test_scheduler import looking, request, results, scheduler_of, shape

TENANTS = ("flood", "flood", "flood", "second", "third", "fourth")


def ids(scheduler: Scheduler) -> list[str]:
    return [sequence.request.id for sequence in scheduler.waiting]


def step(scheduler: Scheduler) -> list[str]:
    """Runs one step; the requests whose first step it is."""
    before = set(scheduler.running)
    plan = scheduler.plan()
    if plan is None:
        return []
    admitted = [s.request.id for s in scheduler.running if s not in before]
    list(scheduler.retire(plan, results(plan)))
    return admitted


def test_528_requests_of_one_tenant_delay_another_by_one_free_slot() -> None:
    cache_manager = KVCacheManager([Full()], [1000], page_tokens=4)
    scheduler = Scheduler(cache_manager, slots=16, step_tokens=64)
    r = random.Random(1)
    for number in range(528):
        scheduler.add(request(f"flood {number}", 3, count=r.randint(5, 40), tenant="flood"))
    while len(scheduler.running) < 16:
        step(scheduler)
    scheduler.add(request("other", 3, count=2, tenant="other"))
    while not (admitted := step(scheduler)):
        pass
    assert admitted[0] == "other"


def test_preempted_sequences_resume_in_the_order_of_their_admission() -> None:
    scheduler = scheduler_of(pages=6)
    for name in ("a", "bb", "ccc"):
        scheduler.add(request(name, 4, count=19))
    while len(scheduler.running) < 3 or scheduler.waiting:
        step(scheduler)
    while len(scheduler.waiting) < 2:
        step(scheduler)
    assert scheduler.preemptions == 2 and ids(scheduler) == ["bb", "ccc"]


def test_a_short_prompt_does_not_wait_for_all_of_a_long_one() -> None:
    """It takes at most half of the rows. Of prompts of similar length the first goes first, and
    nothing is left to a prompt whose image is being encoded."""
    scheduler = scheduler_of(pages=110, slots=9, step_tokens=40)

    def chunks(ready: bool = True) -> list[tuple[str, int]]:
        plan = scheduler.plan(lambda digest: ready)
        found = [(name, length) for name, _, length, _ in shape(plan)]
        list(scheduler.retire(plan, results(plan)))
        return found

    scheduler.add(request("first", 36, count=1))
    assert chunks() == [("first", 36)]
    scheduler.add(request("long", 400, count=1))
    assert chunks() == [("long", 40)]
    scheduler.add(request("again", 120, count=1))  # of which 36 tokens are cached
    assert chunks() == [("long", 20), ("again", 20)]
    assert chunks() == [("long", 20), ("again", 20)]
    assert chunks()[0] == ("long", 20)
    scheduler.finish(scheduler.running[-1])
    scheduler.add(request("little", 12, count=1))
    assert chunks() == [("long", 28), ("little", 12)]
    similar = scheduler.add(request("similar", 100))
    assert chunks() == [("long", 40)]
    scheduler.finish(similar)
    scheduler.add(looking("image", 9, ImageSpan(2, 3, False, b"x"), count=1))
    assert chunks(ready=False) == [("long", 40)]
    assert chunks() == [("long", 31), ("image", 9)]
    for name in ("a", "bb", "ccc"):
        scheduler.add(request(name, 18, count=1))
    assert chunks() == [("long", 20), ("a", 18), ("bb", 2)]
    assert chunks() == [("long", 20), ("bb", 16), ("ccc", 4)]
    assert chunks() == [("long", 26), ("ccc", 14)]


def prompt_chunks(scheduler: Scheduler) -> list[tuple[str, int]]:
    """Runs one step; the requests of its prompts, and the tokens of each."""
    plan = scheduler.plan()
    found = [(name, length) for name, _, length, _ in shape(plan) if length > 1]
    list(scheduler.retire(plan, results(plan)))
    return found


def test_rows_left_to_short_prompts_are_not_taken_by_long_ones_between() -> None:
    """Neither by waiting nor by running ones, however many these are."""
    scheduler = scheduler_of(pages=600, slots=9, step_tokens=40)
    scheduler.add(request("long", 400))
    assert prompt_chunks(scheduler) == [("long", 40)]
    similar = [scheduler.add(request("similar" * n, 300, count=1)) for n in range(1, 5)]
    scheduler.add(request("a", 12, count=1))
    assert prompt_chunks(scheduler) == [("long", 28), ("a", 12)]
    assert prompt_chunks(scheduler) == [("long", 40)]
    for _ in range(7):
        assert prompt_chunks(scheduler) == [("long", 40)]
    assert prompt_chunks(scheduler) == [("long", 12), ("similar", 28)]
    scheduler.finish(similar[3])
    assert prompt_chunks(scheduler)[0] == ("similar", 39)
    scheduler.add(request("bb", 30, count=1))
    assert prompt_chunks(scheduler) == [("similar", 20), ("bb", 19)]


def test_rows_left_to_short_prompts_are_not_taken_by_proposals() -> None:
    scheduler = scheduler_of(pages=600, slots=9, step_tokens=40)
    scheduler.add(request("long", 400))
    assert prompt_chunks(scheduler) == [("long", 40)]
    stream = scheduler.add(request("a", 12, count=60))
    assert prompt_chunks(scheduler) == [("long", 28), ("a", 12)]
    stream.propose((7,) * 30)
    scheduler.add(request("bb", 12, count=1))
    assert prompt_chunks(scheduler) == [("long", 27), ("bb", 12)]


def test_a_prompt_gets_the_rows_that_proposals_leave() -> None:
    scheduler = scheduler_of(step_tokens=8)
    stream = scheduler.add(request("a", 3, count=20))
    assert prompt_chunks(scheduler) == [("a", 3)]
    stream.propose((7, 7, 7, 7))
    scheduler.add(request("bb", 8))
    assert prompt_chunks(scheduler) == [("bb", 3)]


def test_rows_of_a_prompt_are_left_to_none_of_lower_priority() -> None:
    scheduler = scheduler_of(pages=600, slots=9, step_tokens=40)
    scheduler.add(request("long", 400))
    assert prompt_chunks(scheduler) == [("long", 40)]
    scheduler.add(request("later", 12, priority=1))
    assert prompt_chunks(scheduler) == [("long", 40)]
    scheduler.add(request("similar", 300, priority=-1))
    scheduler.add(request("a", 12))
    assert prompt_chunks(scheduler) == [("long", 40)]
    scheduler.add(request("first", 12, priority=-1))
    assert prompt_chunks(scheduler) == [("long", 28), ("first", 12)]


def test_short_prompts_leave_a_slot_to_a_long_one_that_they_pass() -> None:
    scheduler = scheduler_of(pages=600, slots=4, step_tokens=40)
    for name, length in (("long", 60), ("similar", 50), ("a", 4), ("bb", 5), ("ccc", 6)):
        scheduler.add(request(name, length))
    assert prompt_chunks(scheduler) == [("long", 31), ("a", 4), ("bb", 5)]
    assert prompt_chunks(scheduler) == [("long", 29), ("similar", 9)]


def test_they_leave_it_although_one_of_them_is_cached() -> None:
    """It needs fewer rows than are reserved for it; the others need its slot."""
    scheduler = scheduler_of(pages=600, slots=4, step_tokens=40)
    scheduler.add(request("a", 20, count=1))
    assert prompt_chunks(scheduler) == [("a", 20)]
    scheduler.add(request("long", 400))
    assert prompt_chunks(scheduler) == [("long", 40)]
    for name, length in (("similar", 300), ("b", 20), ("cc", 12), ("ddd", 12)):
        scheduler.add(request(name, length))
    assert prompt_chunks(scheduler) == [("long", 20), ("b", 4), ("cc", 12)]
    assert ids(scheduler) == ["similar", "ddd"]


def test_prefixes_of_prompts_that_wait_are_looked_up_once(monkeypatch) -> None:
    """One in each step, because that may take long."""
    looked_up, search = Counter[str](), KVCacheManager.cached_prefix

    def cached_prefix(self: KVCacheManager, owner: Sequence) -> int:
        looked_up[owner.request.id] += 1
        return search(self, owner)

    monkeypatch.setattr(KVCacheManager, "cached_prefix", cached_prefix)
    scheduler = scheduler_of(pages=600, slots=9, step_tokens=40)
    for number in range(1, 30):
        scheduler.add(request("n" * number, 400))
    for number in range(1, 10):
        assert len(prompt_chunks(scheduler)) == 1
        assert len(looked_up) == number and set(looked_up.values()) == {1}


def longest_wait(flood: int) -> int:
    """Steps until the first token of any of 20 requests of a tenant, which has one at a time while
    another one always has `flood`, all with prompts of more than a step."""
    cache_manager = KVCacheManager([Full()], [1000], page_tokens=4, prefix_cache=False)
    scheduler = Scheduler(cache_manager, slots=8, step_tokens=64)
    heavy: deque[Sequence] = deque()
    waits: list[int] = []
    light, waited = None, 0
    while len(waits) < 20:
        while len(heavy) < flood:
            heavy.append(scheduler.add(request("f", 100, count=20, tenant="flood")))
        if light is None or light.state is SequenceState.FINISHED:
            light, waited = scheduler.add(request("other", 100, count=5, tenant="other")), 0
        waited += 1
        step(scheduler)
        if light.answered == 1:
            waits.append(waited)
        heavy = deque(s for s in heavy if s.state is not SequenceState.FINISHED)
    return max(waits)


def test_the_wait_of_a_light_tenant_does_not_grow_with_the_queue_of_a_heavy_one() -> None:
    assert longest_wait(1000) == longest_wait(100) <= 2 * longest_wait(10)


def test_higher_priority_is_admitted_first_but_after_what_resumes() -> None:
    scheduler = scheduler_of(slots=1)
    scheduler.add(request("a", 3, count=1, tenant="a"))
    scheduler.add(request("late", 3, count=1, tenant="b", priority=7))
    scheduler.add(request("first", 3, count=1, tenant="a", priority=-2))
    aborted = scheduler.add(request("aborted", 3, count=1, tenant="a", priority=-9))
    scheduler.finish(aborted)
    scheduler.add(request("old", 3, tenant="c", resume=ResumeState((8,)), priority=9))
    assert ids(scheduler) == ["old", "first", "a", "late"]
    assert step(scheduler) == ["old"]


def test_a_running_sequence_is_not_preempted_for_priority() -> None:
    scheduler = scheduler_of(slots=1)
    scheduler.add(request("a", 3, count=3, tenant="a"))
    assert step(scheduler) == ["a"]
    scheduler.add(request("b", 3, count=1, tenant="b", priority=-1000))
    assert [step(scheduler) for _ in range(3)] == [[], [], ["b"]]


def test_a_tenant_with_few_running_sequences_gets_the_next_slot() -> None:
    scheduler = scheduler_of(slots=3, step_tokens=30)
    scheduler.add(request("a1", 3, count=9, tenant="a"))
    scheduler.add(request("a2", 3, count=9, tenant="a"))
    scheduler.add(request("b1", 3, count=1, tenant="b"))
    for name in ("a3", "a4", "b2"):
        scheduler.add(request(name, 3, count=9, tenant=name[0]))
    assert step(scheduler) == ["a1", "b1", "a2"]
    assert step(scheduler) == ["b2"], "tenant a has two of three slots already"
    assert ids(scheduler) == ["a3", "a4"]


def test_resumed_requests_are_admitted_before_all_turns() -> None:
    scheduler = scheduler_of(slots=1)
    scheduler.add(request("a", 3, count=1, tenant="a"))
    scheduler.add(request("b", 3, count=1, tenant="b"))
    scheduler.add(request("c", 3, tenant="a", resume=ResumeState((8,))))
    assert step(scheduler) == ["c"]


def test_a_preempted_sequence_is_admitted_again_before_other_tenants() -> None:
    scheduler = scheduler_of(pages=4, slots=2)
    scheduler.add(request("a", 7, count=9, tenant="a"))
    preempted = scheduler.add(request("bb", 3, count=5, tenant="a"))
    while not scheduler.preemptions:
        step(scheduler)
    scheduler.add(request("c", 3, count=1, tenant="c"))
    admitted: list[str] = []
    while preempted.state is not SequenceState.FINISHED:
        admitted += step(scheduler)
    assert admitted[0] == "bb"


def test_a_request_without_its_image_does_not_delay_other_tenants() -> None:
    scheduler = scheduler_of(slots=3, step_tokens=30)
    image = ImageSpan(2, 3, False, b"x")
    scheduler.add(looking("image", 6, image, tenant="a"))
    scheduler.add(request("text", 3, tenant="b"))
    scheduler.add(request("more", 3, tenant="a"))
    plan = scheduler.plan(lambda digest: False)
    assert [name for name, *_ in shape(plan)] == ["text", "more"]


def test_images_are_requested_by_turns_over_tenants() -> None:
    scheduler = scheduler_of(slots=3)
    for name in ("a1", "a2", "a3", "a4", "b1"):
        image = ImageSpan(2, 3, False, name.encode())
        scheduler.add(looking(name, 6, image, tenant=name[0]))
    scheduler.plan(lambda digest: False)
    wanted = [want.digest for want in scheduler.image_needs]
    assert wanted[:2] == [b"a1", b"b1"]


def lacking(sequence: Sequence) -> int:
    """What a sequence lacked when it was last looked up or admitted."""
    return len(sequence.tokens) - (sequence.prefix_hit or 0)


class Observer:
    """Checks each admission of a random schedule. While a step cannot compute a prompt as a whole,
    shorter prompts may pass longer ones that wait for it."""

    def __init__(self) -> None:
        self.arrived: dict[str, deque[Sequence]] = {}
        self.overtakes: dict[str, Counter[str]] = {}
        self.checked = self.passed = 0

    def arrive(self, sequence: Sequence) -> None:
        if sequence.resumes:
            return
        queue = self.arrived.setdefault(sequence.request.tenant, deque())
        if not queue:
            self.overtakes[sequence.request.tenant] = Counter()
        queue.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """An aborted one."""
        tenant = sequence.request.tenant
        if sequence in self.arrived.get(tenant, ()):
            self.arrived[tenant].remove(sequence)

    def admit(self, scheduler: Scheduler, earlier: list[Sequence]) -> None:
        """After a plan; `earlier`: what was running before it."""
        kept = [sequence for sequence in scheduler.running if sequence in earlier]
        running = Counter(sequence.request.tenant for sequence in kept)
        cut = any(sequence.remaining > 1 for sequence in scheduler.running)
        for sequence in scheduler.running[len(kept) :]:
            tenant = sequence.request.tenant
            queue = self.arrived.get(tenant, deque())
            if sequence not in queue:  # it goes on
                running[tenant] += 1
                continue
            passed = [each for each in queue if cut and lacking(each) > lacking(sequence)]
            first = next(each for each in queue if each not in passed)
            assert first is sequence, "one tenant's requests keep their order"
            queue.remove(sequence)
            self.overtakes[tenant] = Counter()
            for other, waiting in self.arrived.items():
                if other == tenant or not waiting:
                    continue
                if cut and lacking(waiting[0]) > lacking(sequence):
                    self.passed += 1
                    continue
                counts = self.overtakes.setdefault(other, Counter())
                if running[other]:
                    counts.clear()
                else:
                    counts[tenant] += 1
                    self.checked += 1
                    assert counts[tenant] <= 1, "a tenant without any slot is passed over twice"
            running[tenant] += 1


def random_request(r: random.Random, number: int) -> GenerationRequest:
    tenant = r.choice(TENANTS)
    begun = ResumeState((1, 2)) if r.random() < 0.1 else None
    prompt = tuple(r.randrange(50) for _ in range(r.randint(1, 30)))
    stop = StopRules(r.randint(3, 20))
    return GenerationRequest(str(number), prompt, stop, resume=begun, tenant=tenant)


def trial(seed: int, depth: int) -> tuple[int, int, int]:
    r = random.Random(seed)
    cache_manager = KVCacheManager([Full()], [r.randint(14, 60)], page_tokens=4)
    scheduler = Scheduler(cache_manager, slots=r.randint(1, 5), step_tokens=r.choice([8, 16, 40]))
    todo = [random_request(r, number) for number in range(60)]
    observer, live, in_flight, idle = Observer(), [], deque(), 0
    while todo or scheduler.waiting or scheduler.running or in_flight:
        for _ in range(r.choice([0, 1, 8])):
            if todo:
                live.append(scheduler.add(todo.pop()))
                observer.arrive(live[-1])
        if live and r.random() < 0.05:
            aborted = r.choice(live)
            observer.leave(aborted)
            scheduler.finish(aborted)
        earlier = list(scheduler.running)
        plan = scheduler.plan()
        observer.admit(scheduler, earlier)
        if plan is not None:
            in_flight.append(plan)
        if in_flight and (plan is None or len(in_flight) >= depth):
            oldest = in_flight.popleft()
            list(scheduler.retire(oldest, results(oldest)))
        idle = 0 if plan is not None or in_flight or todo else idle + 1
        assert idle < 10, "the scheduler is stuck"
    assert all(sequence.state is SequenceState.FINISHED for sequence in live)
    cache_manager.check_idle()
    return observer.checked, observer.passed, scheduler.preemptions


def test_no_tenant_is_skipped_or_starves() -> None:
    trials = [trial(seed, depth) for seed in range(30) for depth in (1, 2)]
    checked, passed, preemptions = map(sum, zip(*trials, strict=True))
    assert checked > 500 and passed > 0 and preemptions > 0
