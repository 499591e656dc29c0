"""Mirostat in an engine: its state survives preemption, shifts and resumption."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from model_zoo.chat_model import ChatModel
from runtime.engine.request import (
    ContextShift,
    Delta,
    GenerationRequest,
    ResumeState,
    SamplingParams,
    StopRules,
)
from tests.families.engine_runs import answers, running
from tests.parity.test_speculation import loaded, with_proposals

TOKENS = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ChatModel:
    return loaded("gemma3", Path(tmp_path_factory.mktemp("mirostat")))


def requests(vocab_size: int) -> list[GenerationRequest]:
    """Half of them shift their context several times; one of them samples otherwise."""
    r = random.Random(4)
    found = []
    for number in range(8):
        prompt = tuple(r.randrange(vocab_size) for _ in range(r.randint(3, 30)))
        sampling = SamplingParams(
            seed=number, mirostat=1 + number % 2, mirostat_tau=r.choice((1.0, 4.0)),
            mirostat_eta=0.3, logprobs=r.choice((None, 1)), repeat_penalty=1.1,
        )  # fmt: skip
        if number == 7:
            sampling = SamplingParams(seed=3)
        one = GenerationRequest(str(number), prompt, StopRules(TOKENS), sampling)
        found.append(replace(one, shift=ContextShift(48, keep=4)) if number % 3 == 1 else one)
    return found


def of(found: list[Delta]) -> list[tuple]:
    return [(delta.tokens, delta.logprobs, delta.mirostat_mus, delta.error) for delta in found]


@pytest.fixture(scope="module")
def alone(model) -> list[Delta]:
    with running(model) as engine:
        return answers(engine, requests(model.tokenizer.vocab_size), together=False)


def test_each_token_has_its_state(alone) -> None:
    for delta in alone[:-1]:
        assert len(delta.mirostat_mus) == len(delta.tokens) == TOKENS
        assert len(set(delta.mirostat_mus)) > TOKENS // 2
    assert alone[-1].mirostat_mus == ()


@pytest.mark.parametrize("depth", [1, 3])
def test_answers_are_those_alone_after_preemptions(model, alone, depth: int) -> None:
    options = {"max_sequences": 5, "cache_tokens": 256, "depth": depth}
    with running(model, **options) as engine:
        found = answers(engine, requests(model.tokenizer.vocab_size), together=True)
        statistics = engine.statistics()
    assert statistics.preemptions_total > 0 and statistics.shifts_total > 0
    assert of(found) == of(alone)


def test_nothing_is_proposed_to_sequences_with_a_state(model, alone) -> None:
    asked = requests(model.tokenizer.vocab_size)
    found, right, wrong = with_proposals(model, asked[:-1], alone[:-1], depth=2)
    assert of(found) == of(alone[:-1])
    assert right == wrong == 0


@pytest.mark.parametrize("had", [1, 47])
def test_a_resumed_answer_goes_on_with_the_state(model, alone, had: int) -> None:
    states = [
        ResumeState(whole.tokens[:had], mirostat_mu=whole.mirostat_mus[had - 1])
        for whole in alone[:-1]
    ]
    asked = requests(model.tokenizer.vocab_size)[:-1]
    begun = [replace(one, resume=state) for one, state in zip(asked, states, strict=True)]
    with running(model, depth=2) as engine:
        rest = answers(engine, begun, together=True)
        fresh = [
            replace(one, resume=replace(state, mirostat_mu=None))
            for one, state in zip(asked, states, strict=True)
        ]
        without = answers(engine, fresh, together=True)
    expected = [whole.tokens[had:] for whole in alone[:-1]]
    assert [delta.tokens for delta in rest] == expected
    assert [delta.mirostat_mus for delta in rest] == [w.mirostat_mus[had:] for w in alone[:-1]]
    assert [delta.tokens for delta in without] != expected, "the state makes no difference"
