"""A real model file against llama.cpp and `transformers`: `make test-real`.

By default Gemma 3 270M (see bench/real_model.py); CARAVAN_REAL_MODEL names another path or source.
"""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from bench.accuracy import Reference, accuracy
from bench.contender import Inspectable, Setting
from bench.real import ALTERNATIVES, PEER, SETTINGS, TEXT_TOKENS, contender, text_tokens
from bench.real_model import real_model
from model_zoo.registry import load

SETTING = Setting(threads=2, context_tokens=TEXT_TOKENS + 1, sequences=1, step_tokens=512)
PROMPTS = (
    "The capital of France is",
    "Monday, Tuesday, Wednesday,",
    "1, 2, 3, 4, 5, 6, 7,",
    "To be, or not to be, that is the",
    "def add(a, b):\n    return",
)
ANSWER_TOKENS = 16
# Nats between the first and the second choice; llama.cpp's rounding may decide where it is less.
CLEAR_GAP = 1.0
LEAST_CLEAR_TOKENS = 20  # of all answers together
# Share of places with the same first choice as in float32; llama.cpp has 0.96 with 8 bits.
LEAST_SAME = {"exact": 0.99, "fine": 0.99, "fast": 0.94, "auto": 0.94}  # auto may be fast


@pytest.fixture(scope="module")
def path() -> Path:
    return real_model(os.environ.get("CARAVAN_REAL_MODEL"))


@pytest.fixture(scope="module", params=list(SETTINGS))
def compute(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def ours(path: Path, compute: str) -> Iterator[Inspectable]:
    with closing(contender(compute, path, SETTING)) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    return Reference(path)


def test_answers_are_those_of_llama_cpp_where_the_choice_is_clear(
    path: Path, ours: Inspectable
) -> None:
    tokenizer = load(path, device=torch.device("cpu"), dtype=torch.float32).tokenizer
    clear = 0
    with closing(contender(PEER, path, SETTING)) as peer:
        for prompt in map(tokenizer.encode_document, PROMPTS):
            answer = ours.answer(prompt, ANSWER_TOKENS)
            for index, token in enumerate(answer):
                choices = peer.most_likely([*prompt, *answer[:index]], 2)
                first, second = sorted(choices, key=lambda token: -choices[token])
                if choices[first] - choices[second] < CLEAR_GAP:
                    break
                assert token == first, (tokenizer.decode(prompt), index)
                clear += 1
    assert clear >= LEAST_CLEAR_TOKENS


def test_a_long_text_is_as_likely_as_in_transformers(
    path: Path, compute: str, ours: Inspectable, reference: Reference
) -> None:
    text = text_tokens(path)
    found = accuracy(ours.score(text, ALTERNATIVES), text, reference)
    assert found.same_choices >= LEAST_SAME[compute]
    assert found.perplexity == pytest.approx(found.expected, rel=0.01)
