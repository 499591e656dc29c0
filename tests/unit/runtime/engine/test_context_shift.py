"""Which tokens are cut from a full context, and answers that continue without them."""

import random
from dataclasses import replace

import pytest

from runtime.engine.context_shift import ContextCut, cut_of
from runtime.engine.request import (
    ContextShift,
    FinishReason,
    GenerationRequest,
    ImageSpan,
    Sampled,
    SamplingParams,
    StopRules,
)
from runtime.engine.request_limits import admissible
from runtime.engine.sequence import Sequence
from tests.unit.runtime.engine.fake_runner import next_token
from tests.unit.runtime.engine.test_engine import LIMITS, make_engine, run, token_bytes, whole
from tests.unit.runtime.engine.test_grammar_sequences import Recorded
from tests.unit.runtime.engine.test_resume import at_every_delta
from tests.unit.runtime.engine.test_scheduler import results, scheduler_of
from tests.unit.runtime.engine.test_tracing import Events, kinds
from tests.unit.runtime.engine.test_tracing import make_engine as traced_engine

CONTEXT, KEEP = 40, 4
PROMPT = (5, 6, 7, 8, 9, 10)


def image(start: int, length: int, name: bytes = b"a", first_row: int = 0) -> ImageSpan:
    return ImageSpan(start, length, whole=True, digest=name, first_row=first_row)


@pytest.mark.parametrize(
    ("context", "keep", "prompt", "spans", "expected"),
    [
        (4096, 4, 9, (), (4, 1988)),  # half of 4,092 is 2,046, or 31 * 64 and 62
        (4096, -1, 100, (), (100, 100 + 1984)),
        (4096, 4096, 9, (), (3072, 3584)),  # at most three quarters stay
        (40, 4, 9, (), (4, 20)),
        (8, 0, 3, (), (0, 4)),
        (3, 0, 1, (), (0, 1)),
        (2, -1, 1, (), (0, 1)),
        (40, 4, 38, (image(2, 6),), (2, 2 + 16)),  # part of the image stayed
        (40, 4, 38, (image(4, 6),), (4, 20)),
        (40, 4, 38, (image(18, 6),), (4, 24)),  # the next multiple that does not split it
        (40, 4, 38, (image(10, 7), image(17, 8)), (4, 28)),
        (40, 4, 38, (image(15, 9), image(24, 9, first_row=9)), (4, 36)),  # one image
        (40, 4, 38, (image(15, 9), image(24, 9)), (4, 24)),  # the same image twice
        (40, 4, 38, (image(15, 24),), (4, 39)),  # no multiple is outside
    ],
)  # fmt: skip
def test_the_older_half_of_the_context_is_cut(context, keep, prompt, spans, expected) -> None:
    cut = cut_of(ContextShift(context, keep), prompt, spans)
    assert (cut.begin, cut.end) == expected


def test_any_cut_keeps_images_whole_and_the_last_token() -> None:
    r = random.Random(1)
    for _ in range(3000):
        context = r.randint(2, 200)
        prompt, start, spans = r.randint(1, context - 1), 0, []
        while (start := start + r.randint(0, 30)) + (size := r.randint(1, 60)) <= prompt:
            spans.append(image(start, size, bytes([r.randrange(3)])))
            start += size
        keep = r.randint(-1, context)
        cut = cut_of(ContextShift(context, keep), prompt, spans)
        assert 0 <= cut.begin < cut.end < context
        assert cut.begin <= (prompt if keep < 0 else keep)
        before = [n for n in range(context) if not cut.begin <= n < cut.end]
        assert [cut.moved(n) for n in before] == list(range(len(before)))
        kept = [s for s in spans if s.end <= cut.begin or cut.end <= s.start]
        assert len(kept) + sum(cut.begin <= s.start and s.end <= cut.end for s in spans) == len(
            spans
        )
        assert [before[s.start] for s in cut.spans(spans)] == [s.start for s in kept]


def test_positions_of_sampling_parameters_move() -> None:
    sampling = SamplingParams(counted_from=10, barred_until=12, dropped=3, words_from=10)
    assert ContextCut(4, 8).sampling(sampling) == replace(
        sampling, counted_from=6, barred_until=8, dropped=7, words_from=6
    )
    assert ContextCut(4, 20).sampling(sampling) == replace(
        sampling, counted_from=4, barred_until=0, dropped=19, words_from=4
    )
    before = replace(sampling, words_from=2)  # what is kept ends where the cut is
    assert ContextCut(4, 8).sampling(before).words_from == 4


def asked(count: int, keep: int = KEEP, **more) -> GenerationRequest:
    stop = more.pop("stop", {})
    return GenerationRequest(
        "a", PROMPT, StopRules(count, **stop), shift=ContextShift(CONTEXT, keep), **more
    )


def test_no_step_computes_what_would_follow_the_longest_answer() -> None:
    scheduler = scheduler_of()
    scheduler.add(asked(1))
    assert scheduler.plan() is not None and scheduler.plan() is None


def naive(count: int, keep: int = KEEP) -> tuple[list[int], int]:
    """The answer of the fake model from what is in the context, and the number of shifts."""
    tokens, answer, shifts = list(PROMPT), list[int](), 0
    begin, gone = {4: (4, 16), 0: (0, 20), -1: (len(PROMPT), 16)}[keep]
    for _ in range(count):
        if len(tokens) == CONTEXT:
            del tokens[begin : begin + gone]
            shifts += 1
        tokens.append(next_token(tokens))
        answer.append(tokens[-1])
    return answer, shifts


@pytest.mark.parametrize("keep", [KEEP, 0, -1])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_answer_of_twenty_contexts_goes_on_from_what_is_kept(depth: int, keep: int) -> None:
    engine = make_engine(depth=depth)
    expected, shifts = naive(20 * CONTEXT, keep)
    [box] = run(engine, asked(20 * CONTEXT, keep))
    delta = whole(box)
    assert list(delta.tokens) == expected
    assert delta.text.encode() == b"".join(map(token_bytes, delta.tokens))
    assert delta.finish is FinishReason.LENGTH
    assert delta.usage is not None
    assert (delta.usage.prompt_tokens, delta.usage.completion_tokens) == (6, len(expected))
    assert (engine.statistics().shifts_total, engine.statistics().preemptions_total) == (shifts, 0)


@pytest.mark.parametrize("pages", [12, 40])
@pytest.mark.parametrize("depth", [1, 2])
def test_shifts_of_some_sequences_do_not_change_others(depth: int, pages: int) -> None:
    engine = make_engine(depth=depth, pages=pages)
    requests = [replace(asked(90 - number), id=str(number)) for number in range(5)]
    requests.append(replace(asked(90), id="ends", shift=None, stop=StopRules(30)))
    boxes = run(engine, *requests)
    for one, box in zip(requests, boxes, strict=True):
        count = one.stop.max_tokens
        assert list(whole(box).tokens) == naive(count)[0]
    assert (engine.statistics().preemptions_total > 0) == (pages == 12)


def test_an_answer_ends_with_the_context_unless_this_shifts() -> None:
    engine = make_engine()
    long = GenerationRequest("a", PROMPT, StopRules(1000))
    assert admissible(long, LIMITS, live=0).stop.max_tokens == LIMITS.context_tokens - 6
    shifting = replace(long, shift=ContextShift(10**9, KEEP))
    admitted = admissible(shifting, LIMITS, live=0)
    assert admitted.stop.max_tokens == 1000
    assert admitted.shift == ContextShift(LIMITS.context_tokens, KEEP)
    shorter = replace(long, shift=ContextShift(CONTEXT, KEEP))
    assert admissible(shorter, LIMITS, live=0).shift == shorter.shift
    [box] = run(engine, admissible(long, LIMITS, live=0))
    assert whole(box).finish is FinishReason.LENGTH
    assert engine.statistics().shifts_total == 0


@pytest.mark.parametrize("logprobs", [None, 0])
def test_an_answer_resumed_after_any_delta_is_the_uninterrupted_one(logprobs) -> None:
    one = asked(130, sampling=SamplingParams(logprobs=logprobs))
    [box] = run(make_engine(), one)
    for begun, had, rest in at_every_delta(one, box)[::3]:
        engine = make_engine()
        [continued] = run(engine, replace(one, resume=begun))
        told = whole(continued)
        assert (told.text, told.tokens, told.finish) == (rest.text, rest.tokens, rest.finish)
        assert told.usage is not None and told.usage.completion_tokens == 130
        assert len(had.tokens) == len(begun.tokens)


def test_a_resumed_sequence_has_the_state_of_the_first_one() -> None:
    spans = (image(7, 5), image(14, 9, b"b"))
    prompt = tuple(range(30))
    one = replace(asked(400), prompt=prompt, spans=spans, sampling=SamplingParams(barred_until=99))
    first = Sequence(one, list(prompt))
    drawn = []
    for number in range(300):
        drawn.append(number % 90)
        first.append(Sampled(drawn[-1]))
        if first.fills_context:
            first.shift()
        resumed = Sequence(one, [*prompt, *drawn])
        for name in ("tokens", "spans", "inserted", "sampling", "most_tokens", "answered"):
            assert getattr(resumed, name) == getattr(first, name), (number, name)


def test_stop_strings_and_matchers_read_across_shifts() -> None:
    answer, _ = naive(200)
    text = b"".join(map(token_bytes, answer)).decode()
    place = next(n for n in range(34, 180) if text.find(
        stop := b"".join(map(token_bytes, answer[n : n + 3])).decode()
    ) == len(b"".join(map(token_bytes, answer[:n]))))  # fmt: skip
    grammar = Recorded()
    engine = make_engine()
    stop = b"".join(map(token_bytes, answer[place : place + 3])).decode()
    [box] = run(engine, asked(200, stop={"strings": (stop,)}, grammar=grammar))
    assert whole(box).text == text[: text.index(stop)]
    assert whole(box).matched == stop
    assert grammar.accepted == list(whole(box).tokens) == answer[: place + 3]


def test_what_has_been_computed_again_may_be_a_cached_prefix() -> None:
    engine = make_engine()
    [box] = run(engine, asked(60))
    answer = whole(box).tokens
    # 6 + 60 tokens: shifted twice, by 16 each; the context now begins with 4 tokens of the prompt.
    known = (*PROMPT, *answer)
    context = PROMPT[:4] + known[4 + 32 :]
    [same] = run(engine, GenerationRequest("b", context, StopRules(3)))
    [other] = run(make_engine(), GenerationRequest("b", context, StopRules(3)))
    assert whole(same).tokens == whole(other).tokens
    usage = whole(same).usage
    assert usage is not None and usage.cached_tokens == 32


@pytest.mark.parametrize("depth", [1, 2])
def test_a_trace_shows_shifts(depth: int) -> None:
    events = Events(every=True)
    run(traced_engine(events, depth=depth), asked(60))
    of = events.of["a"]
    found = [kind for kind in kinds(of) if kind not in ("chunk", "delta")]
    assert found == ["request", "admitted", "shifted", "admitted", "shifted", "admitted"]
    shifted = [event.facts for event in of if event.kind == "shifted"]
    assert shifted == [{"kept_tokens": 24, "dropped_tokens": 16}] * 2


def test_a_shifted_sequence_can_end_before_it_is_admitted_again() -> None:
    scheduler = scheduler_of(pages=16, slots=1, step_tokens=8)
    sequence = scheduler.add(asked(100))
    while not scheduler.shifts:
        plan = scheduler.plan()
        list(scheduler.retire(plan, results(plan)))
    assert scheduler.waiting == (sequence,) and sequence.slot is None
    scheduler.finish(sequence)
    assert scheduler.waiting == () and scheduler.plan() is None
    scheduler.cache_manager.check_idle()
