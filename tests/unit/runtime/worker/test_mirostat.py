"""Mirostat: which tokens may be drawn, and the state after them, against llama.cpp's definition."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from runtime.engine.request import SamplingParams
from runtime.kernels import token_order
from runtime.worker.mirostat import mirostat_states
from runtime.worker.sampler import Draws, Path, Sampler, path_of
from tests.unit.runtime.worker.loaded_slots import load_slots
from tests.unit.runtime.worker.test_sampler import CONTEXT, CPU, chi_square, critical, draws_of

VOCAB = 300
PLAIN = SamplingParams(temperature=1.0, top_k=3, top_p=0.2, mirostat=2)
CASES = [
    replace(PLAIN, mirostat=version, mirostat_tau=target, mirostat_eta=rate, temperature=heat)
    for version in (1, 2)
    for target, rate, heat in ((5.0, 0.1, 1.0), (2.0, 1.0, 0.8), (0.5, 0.3, 1.5), (9.0, 0.5, 3.0))
]


@pytest.fixture(autouse=True)
def in_few_blocks(monkeypatch) -> None:
    monkeypatch.setattr(token_order, "SORT_BLOCK", 1000)


def softmax(logits: np.ndarray) -> np.ndarray:
    odds = np.exp(logits - logits.max())
    return odds / odds.sum()


def kept_by_llama_cpp(chances: np.ndarray, s: SamplingParams, mu: float, vocab: int) -> int:
    """chances: descending -> how many of the tokens stay."""
    if s.mirostat == 2:
        return max(1, int((-np.log2(chances) <= mu).sum()))
    ratios = np.log(np.arange(2, 101) / np.arange(1, 100))[: len(chances) - 1]
    steps = np.log(chances[:-1] / chances[1:])[:99]
    slope = (ratios * steps).sum() / (ratios * ratios).sum()
    excess = slope - 1
    k = (excess * 2**mu / (1 - vocab**-excess)) ** (1 / slope)
    return max(1, int(min(k, len(chances))))


def probabilities(logits: np.ndarray, s: SamplingParams, mu: float) -> np.ndarray:
    """logits [vocab] -> the probability of each token."""
    ids = np.argsort(-logits, kind="stable")
    ids = ids[np.isfinite(logits[ids])]
    chances = softmax(logits[ids] / s.temperature)
    ids = ids[: kept_by_llama_cpp(chances, s, mu, len(logits))]
    result = np.zeros(len(logits))
    result[ids] = softmax(logits[ids] / s.temperature)
    return result


class Slots:
    """A sampler whose slot r has the r-th parameters. `positions`: of the next tokens."""

    def __init__(self, sampling: list[SamplingParams], mus: list[float | None]) -> None:
        self.sampling, rows = sampling, len(sampling)
        self.sampler = Sampler(slots=rows, context_tokens=CONTEXT, vocab_size=VOCAB, device=CPU)
        load_slots(self.sampler, sampling, mus=mus)

    def draw(self, logits: torch.Tensor, position: int, rows: list[int] | None = None):
        """Tokens and states of these rows, all of which are of Mirostat."""
        chosen = list(range(len(self.sampling))) if rows is None else rows
        sampling = [self.sampling[row] for row in chosen]
        plain = draws_of(sampling, [position] * len(chosen), list(range(len(chosen))), VOCAB)
        draws: Draws = replace(plain, slots=torch.tensor(chosen))
        drawn = self.sampler.sample(logits.clone(), draws)
        assert drawn.finite.all() and drawn.mirostat_mus is not None
        return drawn.tokens.numpy(), drawn.mirostat_mus.tolist()


@pytest.mark.parametrize("width", [0.7, 3.0, 12.0])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_what_may_be_drawn_and_the_state_are_those_of_llama_cpp(
    case: SamplingParams, width: float
) -> None:
    """At several states, some with forbidden tokens. Every token that may be drawn is."""
    torch.manual_seed(3)
    seeds, target = 200, case.mirostat_tau
    for mu in (None, 0.3 * target, 0.0, 1.3 * target, 40.0):
        logits = torch.randn(VOCAB) * width
        logits[torch.randperm(VOCAB)[:150]] = -torch.inf if mu is None else 0.0
        state = 2 * target if mu is None else mu
        chances = probabilities(logits.double().numpy(), case, float(np.float32(state)))
        slots = Slots([replace(case, seed=n) for n in range(seeds)], [mu] * seeds)
        tokens, mus = slots.draw(logits.repeat(seeds, 1), 7)
        assert (chances[tokens] > 0).all()
        expected = state - case.mirostat_eta * (-np.log2(chances[tokens]) - target)
        np.testing.assert_allclose(mus, expected, rtol=1e-4, atol=1e-4)
        likely = chances > 15 / seeds  # not drawn with a probability below 1e-6
        assert set(np.flatnonzero(likely)) <= set(tokens.tolist())


@pytest.mark.parametrize("version", [1, 2])
def test_tokens_are_drawn_with_their_probabilities(version: int) -> None:
    rows = 8_000
    torch.manual_seed(9)
    logits = torch.randn(VOCAB) * 2
    case = replace(PLAIN, mirostat=version, mirostat_tau=3.0)
    mu = {1: 7.0, 2: 5.0}[version]
    expected = rows * probabilities(logits.double().numpy(), case, mu)
    slots = Slots([replace(case, seed=n) for n in range(rows)], [mu] * rows)
    tokens, _ = slots.draw(logits.repeat(rows, 1), 1)
    observed = np.bincount(tokens, minlength=VOCAB)
    assert 3 < (expected > 0).sum() < VOCAB
    assert (observed[expected == 0] == 0).all()
    common = expected >= 5
    rest = observed[~common].sum(), expected[~common].sum()
    observed, expected = observed[common], expected[common]
    if rest[1]:
        observed, expected = np.append(observed, rest[0]), np.append(expected, rest[1])
    assert chi_square(observed, expected) < critical(len(expected) - 1)


@pytest.mark.parametrize("version", [1, 2])
def test_the_surprise_of_a_text_comes_near_the_target(version: int) -> None:
    torch.manual_seed(5)
    count, target = 120, 2.5
    case = replace(PLAIN, mirostat=version, mirostat_tau=target, mirostat_eta=0.2)
    slots = Slots([replace(case, seed=n) for n in range(20)], [None] * 20)
    surprises = []
    for position in range(1, count):
        logits = torch.randn(20, VOCAB) * 2
        table, positions = slots.sampler.tables[-1], torch.tensor([position] * 20)
        before = mirostat_states(table, torch.arange(20), positions)
        tokens, mus = slots.draw(logits, position)
        surprises.append((before - torch.tensor(mus)) / 0.2 + target)
        for row in range(20):
            chances = probabilities(logits[row].double().numpy(), case, float(before[row]))
            assert chances[tokens[row]] > 0
    late = torch.stack(surprises[count // 3 :])
    assert abs(late.mean() - target) < 0.2


def test_a_position_can_be_drawn_again_and_the_state_can_be_moved_to_another_slot() -> None:
    """A step that is repeated, other rows, and a sequence that enters another slot at an even or
    an odd position change nothing."""
    torch.manual_seed(6)
    logits = torch.randn(12, 2, VOCAB) * 3
    sampling = [replace(PLAIN, mirostat=2, seed=4), replace(PLAIN, mirostat=1, seed=5)]
    slots = Slots(sampling, [None] * 2)
    plain = [slots.draw(each, 1 + n) for n, each in enumerate(logits)]
    assert len({mu for _, mus in plain for mu in mus}) == 24
    again = Slots(sampling, [None] * 2)
    for n, each in enumerate(logits):
        again.draw(torch.randn(2, VOCAB), 1 + n)  # without its mask
        for row in (1, 0):
            token, mus = again.draw(each[row : row + 1], 1 + n, [row])
            assert (token[0], mus[0]) == (plain[n][0][row], plain[n][1][row])
        if n % 3 == 1:
            again = Slots(sampling, plain[n][1])


def test_one_token_or_equal_ones_are_no_special_case() -> None:
    case = [replace(PLAIN, mirostat=version, seed=n) for n in range(50) for version in (1, 2)]
    alone = torch.full((100, VOCAB), -torch.inf)
    alone[:, 7] = 1.0
    tokens, mus = Slots(case, [3.0] * 100).draw(alone, 1)
    assert set(tokens.tolist()) == {7}
    np.testing.assert_allclose(mus, 3.0 + 0.1 * 5.0, rtol=1e-6)
    equal = torch.zeros(100, VOCAB)
    tokens, mus = Slots(case, [math.log2(VOCAB) + 0.01] * 100).draw(equal, 1)
    assert len(set(tokens.tolist())) > 30 and np.isfinite(mus).all()
    tokens, _ = Slots(case, [1.0] * 100).draw(equal, 1)
    assert set(tokens.tolist()) == {0}


def test_only_with_a_temperature_it_takes_the_place_of_the_other_samplers() -> None:
    off = replace(PLAIN, mirostat=0)
    assert path_of(off, VOCAB) is Path.TOP
    assert path_of(replace(PLAIN, typical_p=0.5), VOCAB) is Path.MIROSTAT
    assert path_of(replace(PLAIN, temperature=0.0, typical_p=0.5), VOCAB) is not Path.MIROSTAT
    assert path_of(replace(PLAIN, temperature=0.0, typical_p=0.5), VOCAB) is Path.GREEDY
