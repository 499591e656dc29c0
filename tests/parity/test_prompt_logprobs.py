"""Log-probabilities of prompts against `transformers`, in any steps and beside other requests."""

import random

import pytest
import torch

from model_zoo.registry import load
from runtime.engine.request import (
    MAX_PROMPT_LOGPROBS,
    Delta,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    StopRules,
)
from runtime.errors import RequestError
from tests.families.engine_runs import CPU, answers, running
from tests.tiny_models import write_tiny_llama

GREEDY = SamplingParams(temperature=0)
TOP = 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    twin = write_tiny_llama(path, config="llama3_rope")
    return load(path, device=CPU, dtype=torch.float32), twin


def prompts(vocab_size: int, count: int) -> list[tuple[int, ...]]:
    """They share a prefix of several pages."""
    r = random.Random(3)
    shared = [r.randrange(vocab_size) for _ in range(40)]
    return [
        (*shared, *(r.randrange(vocab_size) for _ in range(r.randint(1, 60)))) for _ in range(count)
    ]


def request(name: str, prompt: tuple[int, ...], *, most: int, top: int = TOP) -> GenerationRequest:
    return GenerationRequest(name, prompt, StopRules(most), GREEDY, prompt_logprobs=top)


def check(delta: Delta, prompt: tuple[int, ...], model, twin) -> None:
    """Token by token, and the most likely ones at each position."""
    logits = twin(torch.tensor([prompt])).logits[0, :, : model.tokenizer.vocab_size]
    expected = logits.log_softmax(-1)
    assert [entry.token for entry in delta.prompt_logprobs] == list(prompt[1:])
    for position, entry in enumerate(delta.prompt_logprobs):
        row = expected[position]
        assert entry.logprob == pytest.approx(row[entry.token].item(), abs=1e-3)
        best = row.topk(TOP)
        assert [each.token for each in entry.top] == best.indices.tolist()
        assert [each.logprob for each in entry.top] == pytest.approx(best.values.tolist(), abs=1e-3)


@pytest.mark.parametrize("most", [0, 5])
def test_prompt_logprobs_do_not_depend_on_caches_and_other_requests(tiny, most) -> None:
    model, twin = tiny
    given = prompts(model.tokenizer.vocab_size, 6)
    plain = [GenerationRequest(f"p{n}", p, StopRules(9), GREEDY) for n, p in enumerate(given)]
    scored = [request(f"s{n}", p, most=most) for n, p in enumerate(given)]
    with running(model, step_tokens=16, depth=2) as engine:
        answers(engine, plain, together=False)  # their pages are cached
        found = answers(engine, [*scored, *plain], together=True)
    for delta, prompt, other in zip(found, given, found[len(scored) :], strict=False):
        check(delta, prompt, model, twin)
        assert delta.finish is FinishReason.LENGTH
        assert delta.tokens == other.tokens[:most]
        assert (delta.usage.cached_tokens, delta.usage.completion_tokens) == (0, most)
        assert not other.prompt_logprobs


def test_preempted_prompts_are_scored_once(tiny) -> None:
    model, twin = tiny
    given = prompts(model.tokenizer.vocab_size, 8)
    asked = [request(str(n), prompt, most=60) for n, prompt in enumerate(given)]
    with running(model, cache_tokens=256, step_tokens=16, depth=2) as engine:
        found = answers(engine, asked, together=True)
        assert engine.statistics().preemptions_total
    for delta, prompt in zip(found, given, strict=True):
        check(delta, prompt, model, twin)
        assert len(delta.tokens) == 60


@pytest.mark.parametrize("most", [0, 1])
def test_a_prompt_may_be_one_token_or_the_whole_context(tiny, most) -> None:
    model, twin = tiny
    whole = tuple(random.Random(1).choices(range(300), k=256 - most))
    with running(model) as engine:
        found = answers(engine, [request("a", (7,), most=most), request("b", whole, most=most)],
                        together=True)  # fmt: skip
    for delta, prompt in zip(found, ((7,), whole), strict=True):
        check(delta, prompt, model, twin)
        assert len(delta.tokens) == most


def test_more_than_the_limit_is_refused(tiny) -> None:
    model, _ = tiny
    most = MAX_PROMPT_LOGPROBS
    with running(model) as engine, pytest.raises(RequestError, match=f"{most:,}"):
        answers(engine, [request("a", (1,) * 200, most=1, top=most // 200)], together=False)
