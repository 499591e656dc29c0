"""Allowed tokens and bad words in an engine: with speculation, preemption, shifts and grammars."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from model_zoo.chat_model import ChatModel
from model_zoo.grammars.token_grammar import TokenGrammars
from runtime.engine.request import (
    ContextShift,
    Delta,
    FinishReason,
    GenerationRequest,
    ResumeState,
    SamplingParams,
    StopRules,
)
from tests.families.engine_runs import answers, running
from tests.parity.test_speculation import loaded, with_proposals

FEW = tuple(range(4, 12))
# Of the allowed tokens, none twice in a row, and not these.
WORDS = (*((n, n) for n in FEW), (4, 5), (6, 7, 8), (9, 4, 10, 5), (11,))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ChatModel:
    return loaded("gemma3", Path(tmp_path_factory.mktemp("restrictions")))


def mask_of(tokens: tuple[int, ...]) -> bytes:
    return np.packbits(np.isin(np.arange(32), tokens), bitorder="little").tobytes()


def requests() -> list[GenerationRequest]:
    """Half of them shift their context several times. The prompts end with beginnings of words,
    which do not count."""
    r = random.Random(3)
    found = []
    for number in range(8):
        prompt = tuple(r.choice(FEW) for _ in range(r.randint(3, 20)))
        sampling = SamplingParams(
            temperature=r.choice((0.0, 2.0)), seed=number, logprobs=1, allowed=mask_of(FEW),
            bad_words=WORDS, words_from=len(prompt),
        )  # fmt: skip
        one = GenerationRequest(str(number), prompt, StopRules(70), sampling)
        found.append(replace(one, shift=ContextShift(48, keep=4)) if number % 2 else one)
    return found


def check(answer: Delta) -> None:
    tokens = answer.tokens
    assert answer.error is None and len(tokens) == 70 and set(tokens) <= set(FEW)
    for word in WORDS:
        places = range(len(tokens) - len(word) + 1)
        assert all(tokens[at : at + len(word)] != word for at in places), word
    assert len(set(tokens)) > 2


def test_answers_follow_the_restrictions_and_are_those_alone(model) -> None:
    asked = requests()
    with running(model) as engine:
        alone = answers(engine, asked, together=False)
    for answer in alone:
        check(answer)
    with running(model, max_sequences=5, cache_tokens=300, depth=2) as engine:
        together = answers(engine, asked, together=True)
        assert engine.statistics().preemptions_total > 0
    assert [(d.tokens, d.logprobs) for d in together] == [(d.tokens, d.logprobs) for d in alone]
    proposed, right, wrong = with_proposals(model, asked, alone, max_sequences=5, depth=2)
    assert [d.tokens for d in proposed] == [d.tokens for d in alone]
    assert min(right, wrong) > 5


def test_a_resumed_answer_continues_words(model) -> None:
    asked = requests()[:4]
    with running(model) as engine:
        whole = answers(engine, asked, together=False)
        cut = [
            replace(a, resume=ResumeState(w.tokens[:33])) for a, w in zip(asked, whole, strict=True)
        ]
        rest = answers(engine, cut, together=True)
    assert [w.tokens[33:] for w in whole] == [d.tokens for d in rest]


def test_a_grammar_that_needs_what_is_forbidden_fails_its_request_alone(model) -> None:
    tokenizer = model.tokenizer
    compiled = TokenGrammars(tokenizer).compile('start: "a" "b"*')
    b = [n for n in range(tokenizer.vocab_size) if tokenizer.token_bytes(n).startswith(b"b")]
    ends = tokenizer.end_tokens
    assert 0 < len(b) < 128
    stuck = GenerationRequest(
        "stuck", (5, 6, 7), StopRules(20, ends),
        SamplingParams(
            seed=1, words_from=3, bad_words=tuple((n,) for n in b),
            barred=tuple(ends), barred_until=9,
        ),
        grammar=compiled,
    )  # fmt: skip
    free = replace(stuck, id="free", sampling=SamplingParams(seed=1))
    with running(model, depth=2) as engine:
        failed, other, plain = answers(engine, [stuck, free, requests()[0]], together=True)
    assert failed.finish is FinishReason.FAILED and "No token may follow" in str(failed.error)
    assert failed.text == "a" and other.text.startswith("a") and other.error is None
    check(plain)
