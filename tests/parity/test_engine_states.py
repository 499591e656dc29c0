"""The whole engine on recurrent models: alone, in batches, and preempted."""

import random

import pytest
import torch

from model_zoo.registry import load
from runtime.engine.request import Delta, GenerationRequest, Pooling, SamplingParams, StopRules
from tests.parity.test_engine import CPU, answers, mixed_requests, running
from tests.parity.text_families import TEXT_MODELS

CONFIGS = [("qwen35moe", "plain"), ("qwen35", "recurrent_last_layer")]


@pytest.fixture(scope="module", params=CONFIGS, ids="-".join)
def hybrid(request, tmp_path_factory) -> tuple:
    path = tmp_path_factory.mktemp("models") / "hybrid.gguf"
    family, config = request.param
    twin = TEXT_MODELS[family].write(path, config)
    return load(path, device=CPU, dtype=torch.float32), twin


@pytest.fixture(scope="module")
def alone(hybrid) -> list[Delta]:
    """The answer to each of the mixed requests alone, with few chunks."""
    model, _ = hybrid
    with running(model, step_tokens=256) as engine:
        return answers(engine, mixed_requests(model.tokenizer.vocab_size), together=False)


def test_greedy_answers_are_those_of_transformers(hybrid) -> None:
    model, twin = hybrid
    r = random.Random(3)
    prompts = [[r.randrange(model.tokenizer.vocab_size) for _ in range(n)] for n in (1, 9, 50, 90)]
    sampling = SamplingParams(temperature=0, logprobs=0)
    requests = [
        GenerationRequest(str(i), tuple(p), StopRules(20), sampling) for i, p in enumerate(prompts)
    ]
    with running(model) as engine:
        results = answers(engine, requests, together=True)
    for prompt, delta in zip(prompts, results, strict=True):
        with torch.inference_mode():
            logits = twin(torch.tensor([prompt + list(delta.tokens)])).logits[0]
        best = logits[len(prompt) - 1 : -1].log_softmax(-1).max(dim=-1)
        assert list(delta.tokens) == best.indices.tolist()
        ours = torch.tensor([sampled.logprob for sampled in delta.logprobs])
        assert torch.allclose(ours, best.values, atol=1e-4)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("cache_tokens", [256, None])
def test_requests_in_a_batch_get_the_answers_they_get_alone(
    hybrid, alone, depth, cache_tokens
) -> None:
    """Prompts share prefixes, steps cut them anywhere, and few pages make for preemption."""
    model, _ = hybrid
    requests = mixed_requests(model.tokenizer.vocab_size)
    with running(model, depth=depth, cache_tokens=cache_tokens) as engine:
        crowd = answers(engine, requests, together=True)
    statistics = engine.statistics()
    assert [d.tokens for d in crowd] == [d.tokens for d in alone]
    for one, other in zip(crowd, alone, strict=True):
        assert one.logprobs == other.logprobs
    assert statistics.cached_tokens_total == 0
    assert (statistics.preemptions_total > 0) == (cache_tokens is not None)
    assert statistics.pages_owned == 0


def test_a_follow_up_is_computed_anew_and_right(hybrid) -> None:
    """Of its prefix there is no state, so none of its pages may be taken for it."""
    model, _ = hybrid
    greedy = SamplingParams(temperature=0)
    turn = GenerationRequest("a", tuple(range(50, 90)), StopRules(30), greedy)
    with running(model) as engine:
        [delta] = answers(engine, [turn], together=False)
        again = GenerationRequest("b", turn.prompt + delta.tokens[:20], StopRules(10), greedy)
        [rest] = answers(engine, [again], together=False)
    assert rest.usage is not None and rest.usage.cached_tokens == 0
    assert rest.tokens == delta.tokens[20:]


@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
def test_vectors_of_prompts_in_a_crowd_are_those_alone(hybrid, pooling) -> None:
    model, _ = hybrid
    r = random.Random(5)
    prompts = [tuple(r.randrange(300) for _ in range(n)) for n in (3, 70, 31, 90, 12)]
    requests = [
        GenerationRequest(str(i), prompt, StopRules(1), pooling=pooling)
        for i, prompt in enumerate(prompts)
    ]
    with running(model, step_tokens=256) as engine:
        alone = answers(engine, requests, together=False)
    with running(model, depth=2) as engine:
        crowd = answers(engine, requests, together=True)
    for one, other in zip(crowd, alone, strict=True):
        ours, theirs = (torch.frombuffer(bytearray(d.vector), dtype=torch.float32)
                        for d in (one, other))  # fmt: skip
        assert torch.allclose(ours, theirs, atol=1e-5)
