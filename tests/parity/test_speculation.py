"""Speculation changes no token and no log-probability of any family, to the bit on a CPU."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model_zoo.chat_model import ChatModel
from model_zoo.grammars.token_grammar import TokenGrammars
from model_zoo.registry import load
from runtime.engine.request import Delta, FinishReason, GenerationRequest, SamplingParams, StopRules
from tests.families.engine_runs import CPU, answers, running
from tests.families.text_families import DIVERSE, TEXT_MODELS
from tests.unit.runtime.engine.random_proposals import RandomProposals

PROPOSED = 6
GREEDY = SamplingParams(temperature=0, logprobs=2)
# Families with recurrent layers.
STATEFUL = (
    "falcon-h1 granitehybrid kimi-linear lfm2 mamba nemotron_h_moe qwen35moe qwen4exp rwkv7".split()
)
WAYS = (
    GREEDY,
    SamplingParams(seed=1, logprobs=0),
    SamplingParams(top_k=0, top_p=0.9, seed=2),
    replace(GREEDY, repeat_penalty=1.3, frequency_penalty=0.3, presence_penalty=0.2),
    replace(GREEDY, dry_multiplier=2.0, dry_allowed_length=1),
    SamplingParams(typical_p=0.8, seed=3, logprobs=1),
    SamplingParams(seed=4, logit_bias=((9, 5.0),), barred=(9, 17), barred_until=30),
    replace(GREEDY, allowed=b"\xf0\0\0\0", bad_words=tuple((n, n) for n in range(4, 8))),
)


def requests_for(vocab_size: int) -> list[GenerationRequest]:
    r = random.Random(5)
    return [
        GenerationRequest(
            str(number),
            tuple(r.randrange(vocab_size) for _ in range(r.randint(3, 30))),
            StopRules(r.randint(12, 25)),
            sampling,
        )
        for number, sampling in enumerate(WAYS)
    ]


def loaded(family: str, folder: Path) -> ChatModel:
    path = folder / "model.gguf"
    TEXT_MODELS[family].write(path, "plain")
    return load(path, device=CPU, dtype=torch.float32)


def with_proposals(
    model: ChatModel, requests: Sequence[GenerationRequest], plain: Sequence[Delta], **options
) -> tuple[list[Delta], int, int]:
    """The answers, the number of proposed tokens, and of those that were wrong."""
    right = {each.id: delta.tokens for each, delta in zip(requests, plain, strict=True)}
    with running(model, proposed_tokens=PROPOSED, **options) as engine:
        scheduler = engine._engine._scheduler
        limits = scheduler.speculation._draws
        scheduler.speculation = RandomProposals(
            random.Random(1), draws=limits, right=lambda request: right[request.id]
        )
        found = answers(engine, requests, together=True)
        totals = engine._engine.statistics()
    proposed, accepted = totals.proposed_tokens_total, totals.accepted_tokens_total
    return found, accepted, proposed - accepted


def check(found: Sequence[Delta], plain: Sequence[Delta]) -> None:
    for one, other in zip(found, plain, strict=True):
        assert one.error is None
        assert (one.tokens, one.text, one.finish) == (other.tokens, other.text, other.finish)
        assert one.logprobs == other.logprobs
        assert one.usage is not None and other.usage is not None
        assert one.usage.completion_tokens == other.usage.completion_tokens


@pytest.mark.parametrize("family", [name for name in DIVERSE if name not in STATEFUL])
def test_answers_are_those_without_proposals(family: str, tmp_path: Path) -> None:
    model = loaded(family, tmp_path)
    requests = [
        replace(each, stop=StopRules(each.stop.max_tokens // 2))
        for each in requests_for(model.tokenizer.vocab_size)
    ]
    with running(model, step_tokens=64) as engine:
        plain = answers(engine, requests, together=True)
    found, right, wrong = with_proposals(model, requests, plain, max_sequences=12)
    check(found, plain)
    assert min(right, wrong) > 2


@pytest.mark.parametrize(("depth", "max_sequences"), [(1, 3), (3, 1), (3, 3)])
def test_answers_are_right_at_any_depth_and_with_few_slots(
    depth: int, max_sequences: int, sliding: ChatModel, plain: list[Delta]
) -> None:
    requests = requests_for(sliding.tokenizer.vocab_size)
    options = {"depth": depth, "max_sequences": max_sequences, "step_tokens": 16}
    found, right, wrong = with_proposals(sliding, requests, plain, **options)
    check(found, plain)
    assert min(right, wrong) > 5


@pytest.fixture(scope="module")
def sliding(tmp_path_factory) -> ChatModel:
    return loaded("gemma3", tmp_path_factory.mktemp("sliding"))


@pytest.fixture(scope="module")
def plain(sliding) -> list[Delta]:
    with running(sliding) as engine:
        return answers(engine, requests_for(sliding.tokenizer.vocab_size), together=False)


def test_answers_end_at_stop_strings_and_end_tokens_within_accepted_tokens(sliding, plain) -> None:
    asked = requests_for(sliding.tokenizer.vocab_size)
    requests = []
    for request, delta in zip(asked, plain, strict=True):
        spelt = [
            sliding.tokenizer.token_bytes(token).decode(errors="replace") for token in delta.tokens
        ]
        stop = replace(request.stop, strings=(spelt[7][-1:] or "?",), min_tokens=4)
        requests.append(replace(request, stop=stop))
        ends = frozenset([delta.tokens[9]])
        requests.append(
            replace(request, id=f"e{request.id}", stop=replace(request.stop, end_tokens=ends))
        )
    with running(sliding) as engine:
        expected = answers(engine, requests, together=False)
    assert sum(delta.finish is FinishReason.STOP for delta in expected) > len(asked)
    whole = [one for delta in plain for one in (delta, delta)]
    found, right, _ = with_proposals(sliding, requests, whole, max_sequences=16)
    check(found, expected)
    assert right > 5


def test_answers_follow_their_grammar_with_proposals(sliding) -> None:
    lark = 'start: "[" item ("," item)* "]"\nitem: /"[a-z ]{2,9}"/ | /[1-9][0-9]{0,3}/'
    compiled = TokenGrammars(sliding.tokenizer).compile(lark)
    requests = [
        replace(
            each,
            sampling=replace(each.sampling, allowed=b""),  # the grammar needs other tokens
            stop=StopRules(40, sliding.tokenizer.end_tokens),
            grammar=compiled,
        )
        for each in requests_for(sliding.tokenizer.vocab_size)
    ]
    with running(sliding) as engine:
        plain = answers(engine, requests, together=False)
    found, right, wrong = with_proposals(sliding, requests, plain, max_sequences=12, depth=2)
    check(found, plain)
    assert min(right, wrong) > 5


@pytest.mark.parametrize("family", STATEFUL)
def test_nothing_is_proposed_to_models_whose_states_cannot_be_undone(
    family: str, tmp_path: Path
) -> None:
    with running(loaded(family, tmp_path), proposed_tokens=PROPOSED) as engine:
        assert engine._engine._scheduler.speculation is None
