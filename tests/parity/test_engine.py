"""The whole engine on tiny models against `transformers`, alone and in batches."""

import random
from dataclasses import replace

import pytest
import torch

from model_zoo.chat_model import ChatModel
from model_zoo.registry import load
from runtime.engine.request import Delta, FinishReason, GenerationRequest, SamplingParams, StopRules
from runtime.errors import ConfigurationError, DoesNotFitError
from tests.families.engine_runs import (
    CPU,
    RECURRENT,
    SLIDING,
    WINDOW,
    answers,
    hybrid,
    mixed_requests,
    running,
)
from tests.families.text_families import TEXT_MODELS
from tests.tiny_models import write_tiny, write_tiny_llama

MODELS = ("tiny", "sliding", "sparse", "sparse_blocks", *RECURRENT)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    twin = write_tiny_llama(path, config="llama3_rope")
    return load(path, device=CPU, dtype=torch.float32), twin


@pytest.fixture(scope="module")
def sliding(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "sliding.gguf"
    twin = write_tiny(path, SLIDING)
    return load(path, device=CPU, dtype=torch.float32), twin


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "sparse.gguf"
    twin = TEXT_MODELS["glm-dsa"].write(path, "indexers_of_two_layers")
    return load(path, device=CPU, dtype=torch.float32), twin


@pytest.fixture(scope="module")
def sparse_blocks(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "sparse_blocks.gguf"
    twin = TEXT_MODELS["minimax-m3"].write(path)
    return load(path, device=CPU, dtype=torch.float32), twin


@pytest.fixture(scope="module", params=MODELS)
def each(request, tmp_path_factory) -> tuple:
    """A model, its twin, and whether it has recurrent layers."""
    if request.param in RECURRENT:
        folder = tmp_path_factory.mktemp("models")
        return *hybrid(request.param, RECURRENT[request.param], folder), True
    return *request.getfixturevalue(request.param), False


def requests_for(model: ChatModel) -> list[GenerationRequest]:
    """Each way to sample twice, in more requests than run at once."""
    return mixed_requests(model.tokenizer.vocab_size)[:12]


@pytest.fixture(scope="module")
def alone(each) -> list[Delta]:
    """The answer to each of the requests alone, with few chunks."""
    model, *_ = each
    with running(model, prefix_cache=False, step_tokens=256) as engine:
        return answers(engine, requests_for(model), together=False)


def test_greedy_answers_are_those_of_transformers(each) -> None:
    model, twin, _ = each
    r = random.Random(3)
    prompts = [[r.randrange(model.tokenizer.vocab_size) for _ in range(n)] for n in (1, 9, 50, 90)]
    requests = [
        GenerationRequest(
            str(i), tuple(p), StopRules(20), SamplingParams(temperature=0, logprobs=0)
        )
        for i, p in enumerate(prompts)
    ]
    with running(model) as engine:
        results = answers(engine, requests, together=True)
    for prompt, delta in zip(prompts, results, strict=True):
        tokens = torch.tensor([prompt + list(delta.tokens)])
        with torch.inference_mode():
            logits = twin(tokens).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        best = logprobs.max(dim=-1)
        assert list(delta.tokens) == best.indices.tolist()
        ours = torch.tensor([sampled.logprob for sampled in delta.logprobs])
        assert torch.allclose(ours, best.values, atol=1e-4)


@pytest.mark.parametrize(
    ("each", "depth", "cache_tokens"),
    # How steps overlap is the same for all families, so that one with recurrent layers has both.
    [
        *((name, 3, 256) for name in MODELS),
        *((name, 1, None) for name in ("tiny", "sliding", "falcon-h1")),
    ],
    indirect=["each"],
)
def test_requests_in_a_batch_get_the_answers_they_get_alone(
    each, alone, depth: int, cache_tokens: int | None
) -> None:
    """Prompts share prefixes, steps cut them anywhere, and few pages make for preemption."""
    model, _, recurrent = each
    with running(model, depth=depth, cache_tokens=cache_tokens) as engine:
        together = answers(engine, requests_for(model), together=True)
    statistics = engine.statistics()  # of the closed engine: the last step has retired
    assert [d.tokens for d in together] == [d.tokens for d in alone]
    assert [d.text for d in together] == [d.text for d in alone]
    for one, other in zip(together, alone, strict=True):
        assert [s.token for s in one.logprobs] == [s.token for s in other.logprobs]
        assert not recurrent or one.logprobs == other.logprobs
    assert recurrent or statistics.cached_tokens_total > 0  # the shared parts are short
    assert (statistics.preemptions_total > 0) == (cache_tokens is not None)
    assert statistics.pages_owned == 0


def test_pages_that_went_to_the_host_and_back_give_the_same_answers(each, alone) -> None:
    """With copies that always pay, so that preempted sequences go on from them. All prompts do not
    fit on the device, so that pages are restored in the second round, whatever the first left."""
    model, *_ = each
    sizes = {"cache_tokens": 256, "host_cache_bytes": 2**24, "depth": 2}
    with running(model, **sizes) as engine:
        requests = requests_for(model)
        together = answers(engine, requests, together=True)
        again = [replace(each, id=f"{each.id} again") for each in requests]
        second = answers(engine, again, together=False)
    statistics = engine.statistics()
    assert [d.tokens for d in together] == [d.tokens for d in alone]
    assert [d.tokens for d in second] == [d.tokens for d in alone]
    assert statistics.preemptions_total > 0 and statistics.pages_owned == 0
    assert statistics.host_pages_stored_total > 0 and statistics.host_pages_restored_total > 0


def test_a_follow_up_reuses_the_conversation_s_pages(tiny) -> None:
    model, _ = tiny
    first = GenerationRequest("a", tuple(range(50, 90)), StopRules(30), SamplingParams(seed=1))
    with running(model) as engine:
        [delta] = answers(engine, [first], together=False)
        turn = first.prompt + delta.tokens + (5, 6, 7)
        [again] = answers(engine, [GenerationRequest("b", turn, StopRules(4))], together=False)
    assert delta.usage is not None and delta.usage.cached_tokens == 0
    # The last token of the answer was never computed, so 69 positions are there: four pages.
    assert again.usage is not None and again.usage.cached_tokens == 64


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_chat_longer_than_the_window_fits_in_a_bounded_cache(sliding, depth: int) -> None:
    model, twin = sliding
    settings = {"context_tokens": 480, "max_sequences": 1, "depth": depth, "step_tokens": 16}
    turn, cached, answered = tuple(range(40, 90)), 0, []
    with running(model, **settings) as engine:
        while len(turn) < 20 * WINDOW:
            ask = GenerationRequest("a", turn, StopRules(60), SamplingParams(temperature=0))
            [delta] = answers(engine, [ask], together=False)
            answered.append((len(turn), delta.tokens))
            turn = (*turn, *delta.tokens, *range(50, 57))
            assert delta.usage is not None
            cached += delta.usage.cached_tokens
    logits = twin(torch.tensor([turn])).logits[0]
    for start, tokens in answered:
        best = logits[start - 1 : start - 1 + len(tokens), : model.tokenizer.vocab_size].argmax(-1)
        assert list(tokens) == best.tolist()
    assert cached > 300
    assert engine.statistics().preemptions_total == 0


def test_a_full_context_ends_with_length(tiny) -> None:
    model, _ = tiny
    request = GenerationRequest("a", (5,) * 250, StopRules(100), SamplingParams(seed=1))
    with running(model) as engine:
        [delta] = answers(engine, [request], together=False)
    assert delta.finish is FinishReason.LENGTH and len(delta.tokens) == 6


def test_too_little_memory_is_refused_with_bytes(tiny) -> None:
    model, _ = tiny
    with pytest.raises(DoesNotFitError, match="bytes"), running(model, memory_bytes=100_000):
        pass


def test_options_that_contradict_the_model_are_refused(tiny) -> None:
    model, _ = tiny
    with pytest.raises(ConfigurationError, match="512"), running(model, context_tokens=1000):
        pass
    crowded = running(model, max_sequences=64)
    with pytest.raises(ConfigurationError, match="step_tokens"), crowded:
        pass
