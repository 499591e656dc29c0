"""Tests of the engine that apply only to recurrent models; `test_engine.py` has the others."""

import random

import pytest
import torch

from model_zoo.chat_model import ChatModel
from runtime.engine.request import GenerationRequest, Pooling, SamplingParams, StopRules
from tests.families.engine_runs import RECURRENT, answers, hybrid, running


@pytest.fixture(scope="module", params=RECURRENT.items(), ids="-".join)
def model(request, tmp_path_factory) -> ChatModel:
    return hybrid(*request.param, tmp_path_factory.mktemp("models"))[0]


def scored(number: str, prompt: tuple[int, ...], *, tokens: int = 10) -> GenerationRequest:
    sampling = SamplingParams(temperature=0, logprobs=2)
    return GenerationRequest(number, prompt, StopRules(tokens), sampling)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_second_turn_goes_on_from_a_checkpoint_with_the_numbers_of_a_fresh_one(
    model, depth
) -> None:
    first = scored("a", tuple(range(50, 150)), tokens=40)
    with running(model, depth=depth) as engine:
        [delta] = answers(engine, [first], together=False)
        # With the answer, as templates with thinking have it, and with too little of the prompt.
        said = first.prompt + delta.tokens
        turns = [
            scored("b", (*said, 5, 6, 7)),
            scored("c", (*first.prompt[:95], *range(20))),
            scored("d", first.prompt[:79]),
        ]
        second = answers(engine, turns, together=False)
    statistics = engine.statistics()  # of the closed engine: the last step has retired
    cached = [delta.usage.cached_tokens for delta in second if delta.usage is not None]
    assert cached == [128, 80, 0]
    computed = sum(len(each.prompt) for each in [first, *turns]) - 128 - 80
    assert statistics.computed_tokens_total == computed
    assert statistics.checkpoint_hits_total == 2
    with running(model, prefix_cache=False) as engine:
        fresh = answers(engine, turns, together=False)
    assert [d.tokens for d in second] == [d.tokens for d in fresh]
    assert [d.logprobs for d in second] == [d.logprobs for d in fresh]


def test_conversations_that_share_prompts_get_the_answers_they_get_alone(model) -> None:
    """Few pages make for preemption, whose victims also go on from checkpoints."""
    r = random.Random(9)
    base = tuple(r.randrange(300) for _ in range(110))
    prompts = [base[: r.choice([70, 110])] + tuple(range(n, n + 30)) for n in range(8)]
    prompts *= 2
    requests = [scored(f"{n}", prompt, tokens=30) for n, prompt in enumerate(prompts)]
    with running(model, prefix_cache=False, step_tokens=256) as engine:
        alone = answers(engine, requests[:8], together=False)
    with running(model, depth=2, cache_tokens=400) as engine:
        together = answers(engine, requests, together=True)
    statistics = engine.statistics()
    assert [d.tokens for d in together] == [d.tokens for d in alone] * 2
    assert [d.logprobs for d in together] == [d.logprobs for d in alone] * 2
    assert statistics.preemptions_total > 0 and statistics.cached_tokens_total > 0
    assert statistics.pages_owned == 0


@pytest.mark.parametrize("family", ["mamba", "rwkv7"])
def test_models_without_attention_go_on_from_checkpoints_with_the_numbers_of_fresh_ones(
    tmp_path, family
) -> None:
    model, _ = hybrid(family, "plain", tmp_path)
    base = tuple(range(50, 140))
    requests = [scored(f"{n}", (*base, *range(n, n + 9)), tokens=12) for n in range(4)]
    with running(model, prefix_cache=False, step_tokens=256) as engine:
        alone = answers(engine, requests, together=False)
    with running(model, depth=2) as engine:
        first = answers(engine, requests[:1], together=False)
        others = answers(engine, requests[1:], together=True)
    assert [d.tokens for d in first + others] == [d.tokens for d in alone]
    assert [d.logprobs for d in first + others] == [d.logprobs for d in alone]
    assert engine.statistics().checkpoint_hits_total > 0


def test_without_bytes_for_checkpoints_only_unused_states_are_checkpoints(model) -> None:
    turn = scored("a", tuple(range(50, 150)))
    for sequences, cached in ((1, 0), (2, 80)):
        sizes = {"max_sequences": sequences, "state_checkpoint_bytes": 0}
        with running(model, **sizes) as engine:
            *_, again = answers(engine, [turn, turn], together=False)
            assert again.usage is not None and again.usage.cached_tokens == cached


@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
def test_vectors_of_prompts_in_a_batch_are_those_alone(model, pooling) -> None:
    r = random.Random(5)
    prompts = [tuple(r.randrange(300) for _ in range(n)) for n in (3, 70, 31, 90, 12)]
    requests = [
        GenerationRequest(str(i), prompt, StopRules(1), pooling=pooling)
        for i, prompt in enumerate(prompts)
    ]
    with running(model, step_tokens=256) as engine:
        alone = answers(engine, requests, together=False)
    with running(model, depth=2) as engine:
        together = answers(engine, requests, together=True)
    for one, other in zip(together, alone, strict=True):
        vectors = (bytearray(delta.vector) for delta in (one, other))
        ours, theirs = (torch.frombuffer(vector, dtype=torch.float32) for vector in vectors)
        assert torch.allclose(ours, theirs, atol=1e-5)
