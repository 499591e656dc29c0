"""The content of single steps; the simulation checks only the results."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from runtime.engine.request import (
    ContextShift,
    FinishReason,
    GenerationRequest,
    ImageSpan,
    Sampled,
    StopRules,
)
from runtime.engine.scheduler import Scheduler
from runtime.engine.sequence import Sequence, SequenceState
from runtime.engine.step_plan import PageWrite, StepPlan
from runtime.kv.cache_kinds import Cross, Full, Sliding
from runtime.kv.cache_manager import KVCacheManager
from runtime.vision.image_rows import plan_insertions
from runtime.worker.model import RowSpan


def scheduler_of(*, pages: int = 16, slots: int = 3, step_tokens: int = 8) -> Scheduler:
    cache_manager = KVCacheManager([Full()], [pages], page_tokens=4)
    return Scheduler(cache_manager, slots=slots, step_tokens=step_tokens)


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
    list(scheduler.retire(first, results(first)))
    second = scheduler.plan()
    assert shape(second) == [("a", 3, 1, True), ("bb", 5, 7, False)]
    list(scheduler.retire(second, results(second)))
    assert shape(scheduler.plan()) == [("a", 4, 1, True), ("bb", 12, 2, True)]


def test_the_next_token_is_planned_before_the_host_knows_it() -> None:
    scheduler = scheduler_of()
    scheduler.add(request("a", 3))
    first = scheduler.plan()
    second = scheduler.plan()
    assert second is not None
    [chunk] = second.chunks
    assert chunk.feedback and chunk.known == () and chunk.start == 3
    list(scheduler.retire(first, results(first)))
    list(scheduler.retire(second, results(second)))
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
        advances = list(scheduler.retire(plan, results(plan)))
    assert advances[0].finish is FinishReason.LENGTH
    assert sequence.state is SequenceState.FINISHED


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
        list(scheduler.retire(plan, results(plan)))
    assert scheduler.preemptions == 1
    resumed = loads[2]
    assert resumed.tokens[:3] == (200, 201, 202)
    assert resumed.tokens[3:] and set(resumed.tokens[3:]) == {9}


@pytest.mark.parametrize("frees", ["end", "moved", "recomputed"])
def test_a_preempted_sequence_runs_again_once_all_of_its_tokens_have_pages(frees: str) -> None:
    """Not as soon as those of its first chunk have, which would cost rows in vain, time and again.
    The first sequence ends, or drops half of its context. The other one has too few pages."""
    cache_manager = KVCacheManager(
        [Full()], [16], page_tokens=4, prefix_cache=False, moves_keys=frees == "moved"
    )
    scheduler = Scheduler(cache_manager, slots=3, step_tokens=16)
    if frees == "end":
        scheduler.add(request("a", 18, count=22))
        scheduler.add(request("ccc", 2, count=16))
    else:
        scheduler.add(request("a", 18, count=40, shift=ContextShift(40, 4)))
    scheduler.add(request("bb", 24, count=13))
    computed, ended = 0, list[str]()
    while (plan := scheduler.plan()) is not None:
        computed += sum(length for name, _, length, _ in shape(plan) if name == "bb")
        for advance in scheduler.retire(plan, results(plan)):
            ended += [advance.sequence.request.id] if advance.finish else []
    assert ended == (["ccc", "a", "bb"] if frees == "end" else ["bb", "a"])
    assert scheduler.preemptions == 1 and computed < 2 * (24 + 13)
    cache_manager.check_idle()


@pytest.mark.parametrize("pages", [9, 6])
def test_a_preempted_sequence_runs_again_once_its_window_has_pages(pages: int) -> None:
    """Both sequences grow to a window of five pages, or six while a chunk is computed."""
    cache_manager = KVCacheManager([Sliding(16)], [pages], page_tokens=4, prefix_cache=False)
    scheduler = Scheduler(cache_manager, slots=2, step_tokens=4)
    scheduler.add(request("a", 3, count=80))
    scheduler.add(request("bb", 3, count=40))
    computed, ended = 0, list[str]()
    while (plan := scheduler.plan()) is not None:
        computed += sum(length for name, _, length, _ in shape(plan) if name == "bb")
        for advance in scheduler.retire(plan, results(plan)):
            ended += [advance.sequence.request.id] if advance.finish else []
    assert ended == ["a", "bb"]
    assert scheduler.preemptions == 1 and computed < 2 * (3 + 40)
    cache_manager.check_idle()


def test_a_preempted_sequence_runs_again_once_one_image_after_the_other_has_pages() -> None:
    """Each stream keeps the two pages of an image; the preempted sequence has three images, each of
    which is released when the next one begins."""
    kinds = [Full(), Cross(3, 6, alignment=4)]
    cache_manager = KVCacheManager(kinds, [18, 6], page_tokens=4, prefix_cache=False)
    scheduler = Scheduler(cache_manager, slots=4, step_tokens=8, step_image_rows=24)

    def images(*starts: int) -> tuple[ImageSpan, ...]:
        return tuple(ImageSpan(at, 1, False, bytes([at]), cross_rows=6) for at in starts)

    scheduler.add(request("a", 3, count=16, spans=images(0)))
    scheduler.add(request("bb", 3, count=28, spans=images(0)))
    scheduler.add(request("ccc", 30, count=9, spans=images(0, 10, 20)))
    ended, resumed = list[str](), list[list[str]]()
    while (plan := scheduler.plan()) is not None:
        resumed += [list(ended) for load in plan.slot_loads if scheduler.preemptions]
        for advance in scheduler.retire(plan, results(plan)):
            ended += [advance.sequence.request.id] if advance.finish else []
    assert scheduler.preemptions == 1 and resumed == [["a"]]
    cache_manager.check_idle()


def test_a_sequence_without_pages_is_tried_again_only_when_one_is_released(monkeypatch) -> None:
    scheduler, tried = scheduler_of(pages=6, step_tokens=100), list[str]()
    adopt = KVCacheManager.adopt
    monkeypatch.setattr(
        KVCacheManager, "adopt", lambda self, own: tried.append(own.request.id) or adopt(self, own)
    )
    for name, length in (("a", 3), ("aa", 10), ("long", 14)):
        scheduler.add(request(name, length, count=9))
    for _ in range(5):
        plan = scheduler.plan()
        assert [chunk[0] for chunk in shape(plan)] == ["a", "aa"]
        list(scheduler.retire(plan, results(plan)))
    assert tried == ["a", "aa", "long"]
    scheduler.finish(scheduler.running[1])
    assert shape(scheduler.plan()) == [("a", 7, 1, True), ("long", 0, 14, True)]
    assert tried == ["a", "aa", "long", "long"]


def test_a_sequence_without_pages_begins_with_those_that_another_one_publishes() -> None:
    scheduler = scheduler_of(pages=6, step_tokens=100)
    scheduler.add(request("a", 16))
    scheduler.add(request("b", 16))  # the same prompt
    first = scheduler.plan()
    assert shape(first) == [("a", 0, 16, True)]
    list(scheduler.retire(first, results(first)))
    assert shape(scheduler.plan()) == [("a", 16, 1, True), ("b", 12, 4, True)]


def test_the_last_step_of_a_finished_sequence_is_dropped() -> None:
    scheduler = scheduler_of()
    sequence = scheduler.add(request("a", 3))
    first, second = scheduler.plan(), scheduler.plan()
    assert first is not None and second is not None
    list(scheduler.retire(first, results(first)))
    scheduler.finish(sequence)
    assert list(scheduler.retire(second, results(second))) == []
    assert sequence.tokens[3:] == [9]
    scheduler.cache_manager.check_idle()


def test_a_chunk_never_ends_inside_a_whole_image() -> None:
    scheduler = scheduler_of()
    span = ImageSpan(start=5, length=6, whole=True, digest=b"x")
    scheduler.add(request("a", 12, spans=(span,)))
    starts = []
    for _ in range(3):
        plan = scheduler.plan()
        starts += shape(plan)
        assert plan is not None
        list(scheduler.retire(plan, results(plan)))
    assert [(start, length) for _, start, length, _ in starts] == [(0, 5), (5, 7), (12, 1)]


def test_a_step_fills_no_more_image_rows_than_its_limit() -> None:
    cache_manager = KVCacheManager([Full(), Cross(2, 6, alignment=4)], [16, 16], page_tokens=4)
    scheduler = Scheduler(cache_manager, slots=3, step_tokens=30, step_image_rows=12)

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
    cache_manager = KVCacheManager([Sliding(4)], [4], page_tokens=4)
    scheduler = Scheduler(cache_manager, slots=1, step_tokens=8)
    scheduler.add(request("a", 30))
    first, second = scheduler.plan(), scheduler.plan()
    assert shape(first) == [("a", 0, 8, False)] and shape(second) == [("a", 8, 8, False)]
    assert scheduler.plan() is None, "all four pages hold what steps in flight see"
    list(scheduler.retire(first, results(first)))
    assert scheduler.preemptions == 0
    list(scheduler.retire(second, results(second)))
    assert shape(scheduler.plan()) == [("a", 16, 8, False)]


@dataclass(frozen=True)
class Picture:
    digest: bytes


def looking(name: str, length: int, *spans: ImageSpan, **more) -> GenerationRequest:
    images = {span.digest: Picture(span.digest) for span in spans}
    return request(name, length, spans=spans, images=tuple(images.values()), **more)


def wanted(scheduler: Scheduler) -> list[tuple[str, bytes]]:
    return [(want.sequence.request.id, want.digest) for want in scheduler.image_needs]


def test_a_sequence_without_its_first_image_does_not_delay_others() -> None:
    scheduler = scheduler_of(slots=1)
    scheduler.add(looking("image", 6, ImageSpan(2, 3, False, b"x")))
    scheduler.add(request("text", 3, count=1))
    plan = scheduler.plan(lambda digest: False)
    assert shape(plan) == [("text", 0, 3, True)]
    assert wanted(scheduler) == [("image", b"x")]
    assert scheduler.plan(lambda digest: True) is None, "there is no slot"
    list(scheduler.retire(plan, results(plan)))
    assert shape(scheduler.plan(lambda digest: True)) == [("image", 0, 6, True)]


class Unread(tuple[ImageSpan, ...]):
    """Spans of which only some may be read."""

    def __iter__(self) -> Iterator[ImageSpan]:
        raise AssertionError("all spans are read")

    __reversed__ = __iter__


def test_neither_a_step_nor_a_page_reads_all_spans_of_a_sequence() -> None:
    """Some models have a span for each line of an image."""
    scheduler = scheduler_of(pages=64, step_tokens=10)
    lines = [ImageSpan(start, 4, False, b"x", first_row=start) for start in range(2, 122, 5)]
    sequence = scheduler.add(looking("image", 130, *lines))
    sequence.spans, sequence.inserted = Unread(sequence.spans), Unread(sequence.inserted)
    while sequence.launched < 130:
        plan = scheduler.plan()
        assert plan is not None
        (chunk,), end = plan.chunks, sequence.launched
        Full().seen(chunk.start, end, sequence.spans)
        parts = plan_insertions([chunk], [RowSpan(0, chunk.length, 0, chunk.start)]).parts
        inside = [line for line in lines if line.start < end and chunk.start < line.end]
        assert [part.begin for part in parts] == [max(s.start, chunk.start) for s in inside]
        list(scheduler.retire(plan, results(plan)))
    scheduler.finish(sequence)
    assert scheduler.cache_manager.cached_prefix(sequence) == 128


def test_streams_wait_for_an_image_no_longer_than_for_text_of_as_many_tokens() -> None:
    def steps(arriving: GenerationRequest) -> list[list[int]]:
        """The lengths of the chunks of three steps in which an image is encoded, and of the next
        three."""
        scheduler, found = scheduler_of(pages=64, step_tokens=12), []
        for name in ("a", "bb"):
            scheduler.add(request(name, 3, count=20))
        for number in range(7):
            plan = scheduler.plan(lambda digest, number=number: number > 3)
            found.append([length for _, _, length, _ in shape(plan)])
            list(scheduler.retire(plan, results(plan)))
            if number == 0:
                scheduler.add(arriving)
        return found[1:]

    image = steps(looking("image", 16, ImageSpan(4, 8, True, b"x")))
    assert image[:3] == 3 * [[1, 1]]
    assert image[3:] == [[1, 1, 4], [1, 1, 10], [1, 1, 2]]
    assert max(map(sum, image)) == max(map(sum, steps(request("text", 16))))


def test_a_prompt_leaves_a_row_for_each_stream_behind_it() -> None:
    """The prompt has been admitted first, and waits for its second image meanwhile. The tokens that
    the first stream proposes leave a row for the second one, too."""
    scheduler, found = scheduler_of(pages=64, slots=4, step_tokens=10), []
    first, second = ImageSpan(1, 2, False, b"x"), ImageSpan(4, 2, False, b"y")
    scheduler.add(looking("prompt", 40, first, second))
    for number in range(5):
        plan = scheduler.plan(lambda digest, number=number: digest == b"x" or number > 1)
        found.append([(name, length) for name, _, length, _ in shape(plan)])
        list(scheduler.retire(plan, results(plan)))
        if number == 0:
            for name in ("a", "bb"):
                scheduler.add(request(name, 3, count=20))
        elif number > 1:
            scheduler.running[1].propose((9, 9))
    assert found[:2] == [[("prompt", 4)], [("a", 3), ("bb", 3)]]
    assert found[2:] == 3 * [[("a", 1), ("bb", 1), ("prompt", 8)]]


def test_a_chunk_ends_before_an_image_that_is_missing() -> None:
    scheduler = scheduler_of(step_tokens=30)
    first, later = ImageSpan(2, 3, True, b"x"), ImageSpan(7, 4, False, b"y")
    scheduler.add(looking("a", 20, first, later))
    plan = scheduler.plan(lambda digest: digest == b"x")
    assert shape(plan) == [("a", 0, 7, False)]
    assert wanted(scheduler) == [("a", b"x"), ("a", b"x"), ("a", b"y")]
    assert scheduler.plan(lambda digest: digest == b"x") is None
    assert wanted(scheduler) == [("a", b"y")]
    assert shape(scheduler.plan()) == [("a", 7, 13, True)]
    assert wanted(scheduler)[:1] == [("a", b"y")]
    assert shape(scheduler.plan(lambda digest: False)) == [("a", 20, 1, True)]
    assert wanted(scheduler) == []


def test_an_image_is_needed_until_its_last_row_is_launched() -> None:
    scheduler = scheduler_of(step_tokens=3)
    scheduler.add(looking("a", 9, ImageSpan(2, 5, False, b"x")))
    seen = []
    while (plan := scheduler.plan()) is not None and len(seen) < 4:
        seen.append((shape(plan)[0][1], wanted(scheduler) != []))
    assert seen == [(0, True), (3, True), (6, True), (9, False)]


def test_an_image_far_behind_the_next_chunk_is_not_requested_yet() -> None:
    scheduler = scheduler_of(step_tokens=4)
    scheduler.add(looking("a", 20, ImageSpan(9, 3, False, b"x")))
    starts = []
    while (plan := scheduler.plan(lambda digest: False)) is not None:
        starts.append((shape(plan)[0][1:3], wanted(scheduler) != []))
    assert starts == [((0, 4), False), ((4, 4), False), ((8, 1), True)]


def test_images_of_sequences_that_wait_for_a_slot_are_requested() -> None:
    scheduler = scheduler_of(slots=1)
    scheduler.add(request("a", 3))
    for name in ("b", "c"):
        scheduler.add(looking(name, 6, ImageSpan(2, 3, False, name.encode())))
    assert shape(scheduler.plan()) == [("a", 0, 3, True)]
    assert shape(scheduler.plan()) == [("a", 3, 1, True)]
    # As many of them as there are slots.
    assert wanted(scheduler) == [("b", b"b")]


def test_a_cached_image_is_not_needed() -> None:
    scheduler = scheduler_of(slots=1, step_tokens=30)
    image = ImageSpan(1, 5, False, b"x")
    scheduler.add(looking("a", 10, image))
    plan = scheduler.plan()
    list(scheduler.retire(plan, results(plan)))
    scheduler.finish(scheduler.running[0])
    scheduler.add(looking("a", 12, image))
    assert shape(scheduler.plan(lambda digest: False)) == [("a", 8, 4, True)]
    assert wanted(scheduler) == []


def test_scores_of_positions_that_were_computed_twice_count_once() -> None:
    """Two chunks are in flight when the sequence is preempted; it begins again before they end."""
    prompt = tuple(range(10))
    scored = Sequence(GenerationRequest("a", prompt, StopRules(1), prompt_logprobs=0), list(prompt))
    scores = [Sampled(token, -1.0) for token in prompt[1:]]

    def add(positions: range) -> None:
        scored.add_scores(positions, tuple(scores[positions.start : positions.stop]))

    flying = [scored.scores_in(0, 4), scored.scores_in(4, 8), scored.scores_in(0, 6)]
    assert flying == [range(4), range(4, 8), range(6)]
    for positions in flying:
        add(positions)
    assert scored.scores_in(6, 10) == range(8, 9)  # the last row scores no token of the prompt
    add(range(8, 9))
    assert scored.take_scores() == tuple(scores)
    assert scored.take_scores() == ()


def test_rows_of_streams_are_together_before_those_of_prompts() -> None:
    """Kernels of attention compute rows that are alone in one launch, whose size is their range."""
    scheduler = scheduler_of(step_tokens=6)
    for name, length in (("long", 40), ("a", 1), ("b", 1)):
        scheduler.add(request(name, length))
    plan = scheduler.plan()
    while plan is not None and len(plan.chunks) < 3:
        list(scheduler.retire(plan, results(plan)))
        plan = scheduler.plan()
    assert plan is not None
    assert [chunk.length for chunk in plan.chunks] == sorted(chunk.length for chunk in plan.chunks)
    assert [chunk.sequence.request.id for chunk in plan.chunks][-1] == "long"
