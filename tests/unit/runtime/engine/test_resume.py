"""Resumed answers are equal to uninterrupted ones."""

import dataclasses
import random
import re

import pytest

from runtime.engine.request import (
    Delta,
    FinishReason,
    GenerationRequest,
    ResumeState,
    Sampled,
    SamplingParams,
    StopRules,
)
from runtime.engine.request_limits import admissible
from runtime.engine.text_stream import TextStream
from runtime.errors import OverloadedError, RequestError
from tests.unit.runtime.engine import test_engine
from tests.unit.runtime.engine.fake_runner import VOCABULARY, answer
from tests.unit.runtime.engine.test_engine import LIMITS, make_engine, run, whole
from tests.unit.runtime.engine.test_scheduler import request, results, scheduler_of, shape

# Tokens of one to three bytes, whose ends are seldom those of characters.
LETTERS = "aé€😀 bß".encode()
PROMPT = (5, 6, 7)


@pytest.fixture
def split_characters(monkeypatch):
    """Tokens that are parts of characters."""

    def token_bytes(token: int) -> bytes:
        begin = token % len(LETTERS)
        return LETTERS[begin : begin + 1 + token % 3]

    monkeypatch.setattr(test_engine, "token_bytes", token_bytes)


def asked(count: int = 20, *, logprobs: int | None = None, **stop) -> GenerationRequest:
    return GenerationRequest(
        "a", PROMPT, StopRules(count, **stop), SamplingParams(logprobs=logprobs)
    )


def at_every_delta(
    one: GenerationRequest, box: list[Delta]
) -> list[tuple[ResumeState, Delta, Delta]]:
    """Where the reader stood between two deltas: what may be gone on from, what there is, what
    has to follow."""
    found = []
    scored = one.sampling.logprobs is not None
    for count in range(1, len(box)):
        had, rest = whole(box[:count]), whole(box[count:])
        told = len(had.logprobs) if scored else len(had.tokens)
        found.append((ResumeState(had.tokens[:told], len(had.text)), had, rest))
    return found


def stop_inside(text: str) -> str:
    """A stop string from the second half of the text; bytes that are not text cannot be one."""
    return max(re.findall(r"[^\ufffd]+", text[len(text) // 2 :]), key=len)[:4]


@pytest.mark.parametrize("logprobs", [None, 0])
@pytest.mark.parametrize("stopped", [False, True])
def test_an_answer_resumed_after_any_delta_is_the_uninterrupted_one(
    split_characters, logprobs, stopped
) -> None:
    one = asked(40, logprobs=logprobs)
    if stopped:
        text = whole(run(make_engine(), one)[0]).text
        one = asked(40, logprobs=logprobs, strings=(stop_inside(text), "a" * 9))
    [box] = run(make_engine(), one)
    ended = whole(box)
    assert ended.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    held_back = 0
    for begun, had, rest in at_every_delta(one, box):
        engine = make_engine()
        [continued] = run(engine, dataclasses.replace(one, resume=begun))
        told = whole(continued)
        drawn_again = len(had.tokens) - len(begun.tokens)
        held_back += drawn_again
        assert told.text == rest.text
        assert told.tokens[drawn_again:] == rest.tokens
        assert told.logprobs == rest.logprobs
        assert told.finish is ended.finish
    assert bool(held_back) == (logprobs is not None)


def test_usage_of_a_resumed_answer_is_that_of_an_uninterrupted_one() -> None:
    [box] = run(make_engine(), asked(12))
    usage = whole(box).usage
    engine = make_engine()
    begun = ResumeState(tuple(answer(PROMPT, 12)[:7]), len(whole(box[:7]).text))
    [continued] = run(engine, dataclasses.replace(asked(12), resume=begun))
    again = whole(continued).usage
    assert usage is not None and again is not None
    assert (again.prompt_tokens, again.completion_tokens) == (3, 12)
    assert engine.statistics().completion_tokens_total == 5, "only those are this engine's work"


def test_cached_tokens_of_the_answer_do_not_count_as_prompt() -> None:
    engine = make_engine()
    drawn = answer(PROMPT, 24)
    run(engine, asked(20))
    [box] = run(engine, dataclasses.replace(asked(24), resume=ResumeState(tuple(drawn[:18]))))
    usage = whole(box).usage
    assert usage is not None and usage.cached_tokens == len(PROMPT)


def test_a_resumed_answer_stops_at_max_tokens() -> None:
    drawn = answer(PROMPT, 12)
    [box] = run(
        make_engine(), dataclasses.replace(asked(12), resume=ResumeState(tuple(drawn[:11])))
    )
    assert whole(box).tokens == (drawn[11],)
    assert whole(box).finish is FinishReason.LENGTH
    with pytest.raises(RequestError, match="already has 12 tokens; it may have 12"):
        admissible(dataclasses.replace(asked(12), resume=ResumeState(tuple(drawn))), LIMITS, live=0)


def test_the_first_delta_has_the_usage_so_far() -> None:
    [box] = run(make_engine(), asked(4))
    assert [delta.usage is not None for delta in box] == [True, False, False, True]
    assert box[0].usage is not None and box[0].usage.completion_tokens == 1
    assert box[0].merged(box[1]).usage == box[0].usage


def test_a_resumed_request_is_not_refused_by_a_full_queue() -> None:
    assert admissible(
        dataclasses.replace(asked(), resume=ResumeState()), LIMITS, live=LIMITS.max_live
    )
    with pytest.raises(OverloadedError):
        admissible(asked(), LIMITS, live=LIMITS.max_live)


def test_a_token_that_the_model_does_not_have_is_refused() -> None:
    begun = ResumeState((VOCABULARY,))
    with pytest.raises(RequestError, match="outside the vocabulary"):
        admissible(dataclasses.replace(asked(), resume=begun), LIMITS, live=0)


def test_a_request_that_was_running_elsewhere_precedes_waiting_ones() -> None:
    scheduler = scheduler_of(slots=1)
    scheduler.add(request("a", 3, count=1))
    scheduler.add(request("bb", 3, count=1))
    scheduler.add(request("ccc", 3, resume=ResumeState((8,))))
    plan = scheduler.plan()
    assert shape(plan) == [("ccc", 0, 4, True)]
    list(scheduler.retire(plan, results(plan)))


def test_requests_that_were_running_elsewhere_resume_in_the_order_of_their_arrival() -> None:
    """All those of a lost replica arrive at once."""
    scheduler = scheduler_of(slots=1)
    for name in ("a", "bb", "ccc"):
        scheduler.add(request(name, 3, resume=ResumeState((8,))))
    assert [each.request.id for each in scheduler.waiting] == ["a", "bb", "ccc"]


def test_a_request_that_was_waiting_elsewhere_waits_behind_local_ones() -> None:
    scheduler = scheduler_of(slots=1)
    scheduler.add(request("a", 3, count=1))
    scheduler.add(request("bb", 3, resume=ResumeState(had_turn=False)))
    scheduler.add(request("ccc", 3, count=1))
    assert [each.request.id for each in scheduler.waiting] == ["a", "bb", "ccc"]


def random_pieces(r: random.Random) -> tuple[list[bytes], list[str]]:
    alphabet = "abé😀 STO"
    data = "".join(r.choice(alphabet) for _ in range(r.randint(1, 30))).encode()
    cuts = sorted(r.randint(0, len(data)) for _ in range(8))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    stops = ["".join(r.choice(alphabet) for _ in range(r.randint(1, 4))) for _ in range(2)]
    return pieces, stops


def test_a_resumed_text_continues_after_the_characters_the_client_has() -> None:
    r = random.Random(3)
    compared = 0
    for _ in range(400):
        pieces, stops = random_pieces(r)
        first = TextStream(stops)
        said, shown = "", 0
        for count, piece in enumerate(pieces, 1):
            text, tokens = first.push(piece, Sampled(count))
            said, shown = said + text, shown + len(tokens)
            if first.stopped:
                break
            for known in {count, shown}:  # from the last token, or from the last one that was shown
                assert (said + rest_of(pieces, known, stops, said), known) == (
                    rest_of(pieces, 0, stops, ""),
                    known,
                )
                compared += 1
    assert compared > 2000


def rest_of(pieces: list[bytes], known: int, stops: list[str], said: str) -> str:
    stream = TextStream(stops)
    stream.resume(b"".join(pieces[:known]), len(said))
    text = ""
    for piece in pieces[known:]:
        text += stream.push(piece, Sampled(0))[0]
        if stream.stopped:
            return text
    return text + stream.flush()[0]
