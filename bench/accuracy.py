"""How far log-probabilities of a real text are from those of `transformers` in float32."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.contender import Scored
from bench.reference import Reference


@dataclass(frozen=True, slots=True)
class Accuracy:
    """`worst`, `mean`: differences of log-probabilities in nats, of the text's tokens and of the
    most likely ones at their places. `same_choices`: share of the places with the same most likely
    token. `perplexity`: of the text, and `expected` that of the reference."""

    worst: float
    mean: float
    same_choices: float
    perplexity: float
    expected: float


def accuracy(scored: Sequence[Scored], text: Sequence[int], reference: Reference) -> Accuracy:
    """`scored`: the tokens of the text but the first."""
    assert [place.token for place in scored] == list(text[1:])
    tokens = np.array([[place.token, *place.top] for place in scored])
    found = np.array([[place.logprob, *place.top.values()] for place in scored])
    expected, best = reference.logprobs(text, tokens)
    distance = np.abs(found - expected)
    same = [place.first_choice == choice for place, choice in zip(scored, best[:, 0], strict=True)]
    return Accuracy(
        float(distance.max()),
        float(distance.mean()),
        float(np.mean(same)),
        math.exp(-found[:, 0].mean()),
        math.exp(-expected[:, 0].mean()),
    )
