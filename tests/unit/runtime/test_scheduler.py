"""What each step contains, where the simulation would only show that it came out right."""

from runtime.kv.ledger import PageLedger
from runtime.kv.spec import Cross, Full, Sliding
from runtime.request import FinishReason, GenerationRequest, ImageSpan, Sampled, StopRules
from runtime.scheduler import PageWrite, Scheduler, State, StepPlan


def scheduler_of(*, pages: int = 16, slots: int = 3, step_tokens: int = 8) -> Scheduler:
    ledger = PageLedger([Full()], [pages], page_tokens=4)
    return Scheduler(ledger, slots=slots, step_tokens=step_tokens)


def request(name: str, length: int, count: int = 5, **more) -> GenerationRequest:
    prompt = tuple(100 * len(name) + i for i in range(length))
    return GenerationRequest(name, prompt, StopRules(count), **more)


def results(plan: StepPlan) -> tuple[Sampled | None, ...]:
    return tuple(Sampled(9) if chunk.samples else None for chunk in plan.chunks)


def shape(plan: StepPlan | None) -> list[tuple[str, int, int, bool]]:
    assert plan is not None
    return [(c.sequence.request.id, c.start, c.length, c.samples) for c in plan.chunks]


def test_a_long_prompt_is_cut_to_the_budget_and_decoding_rides_along() -> None:
    scheduler = scheduler_of()
    scheduler.add(request("a", 3))
    scheduler.add(request("bb", 14))
    first = scheduler.plan()
    assert shape(first) == [("a", 0, 3, True), ("bb", 0, 5, False)]
    scheduler.retire(first, results(first))
    second = scheduler.plan()
    assert shape(second) == [("a", 3, 1, True), ("bb", 5, 7, False)]
    scheduler.retire(second, results(second))
    assert shape(scheduler.plan()) == [("a", 4, 1, True), ("bb", 12, 2, True)]


def test_the_next_token_is_planned_before_the_host_knows_it() -> None:
    scheduler = scheduler_of()
    scheduler.add(request("a", 3))
    first = scheduler.plan()
    second = scheduler.plan()
    assert second is not None
    [chunk] = second.chunks
    assert chunk.feedback and chunk.known == () and chunk.start == 3
    scheduler.retire(first, results(first))
    scheduler.retire(second, results(second))
    third = scheduler.plan()
    assert third is not None and not third.chunks[0].feedback
    assert third.chunks[0].known == (9,)


def test_planning_ahead_never_exceeds_max_tokens() -> None:
    scheduler = scheduler_of()
    sequence = scheduler.add(request("a", 3, count=2))
    plans = [scheduler.plan(), scheduler.plan(), scheduler.plan()]
    assert plans[2] is None
    for plan in plans[:2]:
        assert plan is not None
        advances = scheduler.retire(plan, results(plan))
    assert advances[0].finish is FinishReason.LENGTH
    assert sequence.state is State.FINISHED


def test_a_step_loads_slots_and_pages_once() -> None:
    scheduler = scheduler_of()
    scheduler.add(request("a", 6))
    plan = scheduler.plan()
    assert plan is not None
    [load] = plan.slot_loads
    assert load.tokens == tuple(range(100, 106))
    assert plan.page_writes == (PageWrite(0, load.slot, 0, 0), PageWrite(0, load.slot, 1, 1))
    following = scheduler.plan()
    assert following is not None
    assert following.slot_loads == () and following.page_writes == ()


def test_the_latest_admitted_is_preempted_and_resumes_with_its_tokens() -> None:
    scheduler = scheduler_of(pages=4, slots=2)
    scheduler.add(request("a", 7, count=9))
    scheduler.add(request("bb", 3, count=5))
    loads = []
    for _ in range(30):
        plan = scheduler.plan()
        if plan is None:
            break
        loads += plan.slot_loads
        scheduler.retire(plan, results(plan))
    assert scheduler.preemptions == 1
    resumed = loads[2]
    assert resumed.tokens[:3] == (200, 201, 202)
    assert resumed.tokens[3:] and set(resumed.tokens[3:]) == {9}


def test_a_finished_sequence_s_orphan_step_is_dropped() -> None:
    scheduler = scheduler_of()
    sequence = scheduler.add(request("a", 3))
    first, second = scheduler.plan(), scheduler.plan()
    assert first is not None and second is not None
    scheduler.retire(first, results(first))
    scheduler.finish(sequence)
    assert scheduler.retire(second, results(second)) == []
    assert sequence.tokens[3:] == [9]
    scheduler.ledger.check_idle()


def test_a_chunk_never_ends_inside_a_whole_image() -> None:
    scheduler = scheduler_of()
    span = ImageSpan(start=5, length=6, whole=True, digest=b"x")
    scheduler.add(request("a", 12, spans=(span,)))
    starts = []
    for _ in range(3):
        plan = scheduler.plan()
        starts += shape(plan)
        assert plan is not None
        scheduler.retire(plan, results(plan))
    assert [(start, length) for _, start, length, _ in starts] == [(0, 5), (5, 7), (12, 1)]


def test_a_step_fills_no_more_rows_of_images_than_it_has_room_for() -> None:
    ledger = PageLedger([Full(), Cross(2, 6, alignment=4)], [16, 16], page_tokens=4)
    scheduler = Scheduler(ledger, slots=3, step_tokens=30, step_image_rows=12)

    def images(*starts: int) -> tuple[ImageSpan, ...]:
        return tuple(ImageSpan(at, 1, False, bytes([at]), cross_rows=6) for at in starts)

    scheduler.add(request("a", 9, spans=images(5)))
    scheduler.add(request("bb", 9, spans=images(2, 7)))
    scheduler.add(request("ccc", 9, spans=images(0)))
    first = scheduler.plan()
    # The second image of bb would be the third of the step; so would the first of ccc.
    assert shape(first) == [("a", 0, 9, True), ("bb", 0, 7, False)]
    second = scheduler.plan()
    assert shape(second) == [("a", 9, 1, True), ("bb", 7, 2, True), ("ccc", 0, 9, True)]


def test_a_sequence_waits_for_its_own_steps_rather_than_lose_its_pages() -> None:
    ledger = PageLedger([Sliding(4)], [4], page_tokens=4)
    scheduler = Scheduler(ledger, slots=1, step_tokens=8)
    scheduler.add(request("a", 30))
    first, second = scheduler.plan(), scheduler.plan()
    assert shape(first) == [("a", 0, 8, False)] and shape(second) == [("a", 8, 8, False)]
    assert scheduler.plan() is None, "all four pages hold what steps in flight see"
    scheduler.retire(first, results(first))
    assert scheduler.preemptions == 0
    scheduler.retire(second, results(second))
    assert shape(scheduler.plan()) == [("a", 16, 8, False)]
