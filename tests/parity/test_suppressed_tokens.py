"""Tokens that a file suppresses occur in no answer, whatever proposes or restricts tokens."""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from model_zoo.chat_model import ChatModel
from model_zoo.grammars.token_grammar import TokenGrammars
from model_zoo.registry import load
from runtime.engine.request import Delta, GenerationRequest, SamplingParams, StopRules
from tests.families.engine_runs import CPU, answers, running
from tests.families.text_families import TEXT_MODELS
from tests.gguf_files import rewrite
from tests.parity.test_divided_models import fed
from tests.parity.test_drafts import drafting
from tests.parity.test_speculation import check, requests_for, with_proposals
from tests.thread_ranks import Meeting

KEY = "tokenizer.ggml.suppress_tokens"
GREEDY = SamplingParams(temperature=0, logprobs=3)


class Models:
    """The same weights with and without suppressed tokens, which are those that greedy answers have
    most often, and the twin in `transformers`."""

    def __init__(self, folder: Path) -> None:
        self.path, self.twin = (
            folder / "tiny.gguf",
            TEXT_MODELS["gemma4"].write(folder / "all.gguf"),
        )
        self.free = load(folder / "all.gguf", device=CPU, dtype=torch.float32)
        counts = Counter(self.tokens(self.free))
        self.suppressed = [token for token, _ in counts.most_common(3)]
        rewrite(folder / "all.gguf", self.path, keys={KEY: self.suppressed})
        self.model = load(self.path, device=CPU, dtype=torch.float32)

    def tokens(self, model: ChatModel) -> list[int]:
        return [token for delta in plain_answers(model) for token in delta.tokens]


def asked(model: ChatModel) -> list[GenerationRequest]:
    every = requests_for(model.tokenizer.vocab_size)
    return [replace(each, sampling=replace(each.sampling, allowed=b"")) for each in every]


def plain_answers(model: ChatModel) -> list[Delta]:
    with running(model) as engine:
        return answers(engine, asked(model), together=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    return Models(tmp_path_factory.mktemp("suppressed"))


@pytest.fixture(scope="module")
def plain(models) -> list[Delta]:
    return plain_answers(models.model)


def test_answers_and_log_probabilities_have_other_tokens(models, plain) -> None:
    assert models.suppressed
    for delta in plain:
        listed = {each.token for one in delta.logprobs for each in (*one.top, one)}
        assert not listed & {*models.suppressed} and not {*delta.tokens} & {*models.suppressed}


def test_greedy_answers_are_those_of_transformers(models) -> None:
    prompt = requests_for(models.model.tokenizer.vocab_size)[0].prompt
    request = GenerationRequest("a", prompt, StopRules(12), GREEDY)
    with running(models.model) as engine:
        [delta] = answers(engine, [request], together=True)
    expected = models.twin.generate(
        torch.tensor([prompt]),
        suppress_tokens=models.suppressed,
        do_sample=False,
        min_new_tokens=12,
        max_new_tokens=12,
    )
    assert list(delta.tokens) == expected[0, len(prompt) :].tolist()


def alternating(own: Delta, other: Delta) -> Delta:
    pairs = zip(own.tokens, other.tokens, strict=False)
    return Delta("", tuple(pair[n % 2] for n, pair in enumerate(pairs)))


def test_proposals_of_suppressed_tokens_change_no_answer(models, plain) -> None:
    """They are in turn the model's own tokens and those of the model that suppresses nothing."""
    proposed = list(map(alternating, plain, plain_answers(models.free)))
    found, right, wrong = with_proposals(models.model, asked(models.model), proposed)
    check(found, plain)
    assert min(right, wrong) > 2


def test_drafts_of_a_model_that_suppresses_nothing_change_no_answer(models, plain) -> None:
    with drafting(models.model, models.free) as drafted:
        check(answers(drafted.engine, asked(models.model), together=True), plain)
        assert sum(drafted.counts) > 5


def test_grammars_choose_among_the_other_tokens(models) -> None:
    tokenizer = models.model.tokenizer
    compiled = TokenGrammars(tokenizer).compile("start: /[ -~]*/")
    requests = [
        replace(each, grammar=compiled, stop=StopRules(10, tokenizer.end_tokens))
        for each in asked(models.model)
    ]
    with running(models.model) as engine:
        for delta in answers(engine, requests, together=True):
            assert delta.error is None and not {*delta.tokens} & {*models.suppressed}


def test_every_rank_suppresses_them(models) -> None:
    for logits in Meeting(2).each(partial(fed, models.path)):
        assert (logits[:, models.suppressed] == -torch.inf).all()
        assert logits.isfinite().sum(dim=1).min() > len(models.suppressed)
