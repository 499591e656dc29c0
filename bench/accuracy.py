"""The differences between log-probabilities of a real text and those of `transformers` in
float32."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.contender import Scored
from bench.reference import Reference


@dataclass(frozen=True, slots=True)
class Accuracy:
    """`worst`, `mean`: differences of log-probabilities in nats, over the text's tokens and the
    most likely tokens at their places. `same_choices`: the share of places with the same most
    likely token. `perplexity`: that of the text; `expected`: the reference's perplexity."""

    worst: float
    mean: float
    same_choices: float
    perplexity: float
    expected: float


def accuracy(scored: Sequence[Scored], text: Sequence[int], reference: Reference) -> Accuracy:
    """Compares with the reference. `scored`: the tokens of the text except the first."""
    assert [place.token for place in scored] == list(text[1:])
    tokens = np.array([[place.token, *place.top] for place in scored])
    found = np.array([[place.logprob, *place.top.values()] for place in scored])
    expected, best = reference.logprobs(text, tokens)
    distance = np.abs(found - expected)
    same = [place.first_choice == choice for place, choice in zip(scored, best, strict=True)]
    return Accuracy(
        float(distance.max()),
        float(distance.mean()),
        float(np.mean(same)),
        math.exp(-found[:, 0].mean()),
        math.exp(-expected[:, 0].mean()),
    )
