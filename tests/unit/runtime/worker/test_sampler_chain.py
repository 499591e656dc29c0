"""The samplers of llama.cpp: probabilities against its definitions, one token after the other."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import TypicalLogitsWarper

from runtime.engine.request import SamplingParams
from runtime.engine.step_plan import SlotLoad
from runtime.kernels.token_order import sorted_tokens
from runtime.worker.sampler import SamplingPath, path_of
from runtime.worker.sampler_chain import ChainRows, chain_spec, odds_of
from tests.unit.runtime.worker.test_sampler import chi_square, critical, sample

VOCAB = 300
# logits [vocab] and parameters -> ids of the tokens that are left.
Filter = Callable[[np.ndarray, SamplingParams], np.ndarray]
PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0)
CASES = [
    replace(PLAIN, **case)
    for case in (
        {"typical_p": 0.3},
        {"typical_p": 0.9, "temperature": 0.7},
        {"typical_p": 0.6, "top_k": 30, "top_p": 0.8, "min_p": 0.05, "temperature": 2.0},
        {"typical_p": 0.5, "min_p": 0.5},
        {"top_n_sigma": 0.5},
        {"top_n_sigma": 1.5, "top_p": 0.9, "temperature": 1.4},
        {"top_n_sigma": 1.0, "top_k": 5},
        {"xtc_probability": 1.0, "xtc_threshold": 0.05},
        {"xtc_probability": 1.0, "xtc_threshold": 0.01, "min_p": 0.02, "temperature": 0.5},
        {"xtc_probability": 1.0, "xtc_threshold": 0.5},
        {"dynatemp_range": 0.5},
        {"dynatemp_range": 3.0, "dynatemp_exponent": 2.0, "top_k": 50},
        {"dynatemp_range": 0.4, "dynatemp_exponent": 0.0, "temperature": 0.5},
        {
            "top_n_sigma": 2.0, "typical_p": 0.9, "top_p": 0.95, "min_p": 0.01, "temperature": 0.8,
            "xtc_probability": 1.0, "xtc_threshold": 0.02, "dynatemp_range": 0.3,
        },
    )
]  # fmt: skip


def softmax(logits: np.ndarray) -> np.ndarray:
    odds = np.exp(logits - logits.max())
    return odds / odds.sum()


def entropy(chances: np.ndarray) -> float:
    return float(-sum(p * np.log(p) for p in chances if p > 0))


def descending(logits: np.ndarray) -> np.ndarray:
    """The finite ones, as ids."""
    ids = np.argsort(-logits, kind="stable")
    return ids[np.isfinite(logits[ids])]


def top_n_sigma(logits: np.ndarray, s: SamplingParams) -> np.ndarray:
    kept = logits[np.isfinite(logits)]
    return descending(logits)[: int((kept >= kept.max() - s.top_n_sigma * kept.std()).sum())]


def typical_p(logits: np.ndarray, s: SamplingParams) -> np.ndarray:
    ids = descending(logits)
    chances = softmax(logits[ids])
    order = np.argsort(np.abs(-np.log(chances) - entropy(chances)), kind="stable")
    sums = np.cumsum(chances[order])
    return ids[order[: int((sums <= s.typical_p).sum()) + 1]]


def top_p(logits: np.ndarray, s: SamplingParams) -> np.ndarray:
    ids = descending(logits)
    return ids[: int((np.cumsum(softmax(logits[ids])) < s.top_p).sum()) + 1]


def min_p(logits: np.ndarray, s: SamplingParams) -> np.ndarray:
    ids = descending(logits)
    chances = softmax(logits[ids])
    return ids[chances >= s.min_p * chances[0]]


def xtc(logits: np.ndarray, s: SamplingParams) -> np.ndarray:
    ids = descending(logits)
    above = int((softmax(logits[ids]) >= s.xtc_threshold).sum())
    return ids[max(above - 1, 0) :]


# As in `common_params_sampling` of llama.cpp, behind penalties and DRY. What each leaves.
FILTERS: dict[str, tuple[Callable[[SamplingParams], bool], Filter]] = {
    "top_n_sigma": (lambda s: s.top_n_sigma > 0, top_n_sigma),
    "top_k": (lambda s: s.top_k > 0, lambda logits, s: descending(logits)[: s.top_k]),
    "typical_p": (lambda s: s.typical_p < 1, typical_p),
    "top_p": (lambda s: s.top_p < 1, top_p),
    "min_p": (lambda s: s.min_p > 0, min_p),
    "xtc": (lambda s: s.xtc_probability > 0, xtc),
}
ORDER = (*FILTERS, "temperature")


def reference(
    logits: np.ndarray,
    s: SamplingParams,
    *,
    excluding: bool = True,
    order: Sequence[str] = ORDER,
) -> np.ndarray:
    """logits [vocab] -> probabilities, by llama.cpp's chain of samplers. `excluding`: whether the
    random number of XTC is below its probability."""
    for name in order:
        if name == "temperature":
            logits = logits / heat(logits, s)
            continue
        active, left = FILTERS[name]
        if active(s) and (excluding or name != "xtc"):
            kept = left(logits, s)
            logits = np.where(np.isin(np.arange(len(logits)), kept), logits, -np.inf)
    return softmax(logits)


def heat(logits: np.ndarray, s: SamplingParams) -> float:
    """The temperature, dynamic if that is requested."""
    kept = logits[np.isfinite(logits)]
    if s.dynatemp_range <= 0 or len(kept) < 2:
        return s.temperature
    low, high = max(0.0, s.temperature - s.dynatemp_range), s.temperature + s.dynatemp_range
    share = entropy(softmax(kept)) / np.log(len(kept))
    return low + (high - low) * share**s.dynatemp_exponent


def probabilities(
    logits: torch.Tensor, sampling: list[SamplingParams], chance: float
) -> np.ndarray:
    """logits [rows, vocab] -> probabilities [rows, vocab]."""
    columns = torch.tensor([[s.temperature, s.top_p, s.min_p, s.top_k or VOCAB] for s in sampling])
    temperature, top_p, min_p, top_k = columns.split(1, dim=1)
    chances = torch.full((len(sampling), 1), chance, dtype=torch.float64)
    (rows,) = chain_spec().rows([SlotLoad(slot, (), s) for slot, s in enumerate(sampling)])
    chain = torch.tensor(rows)
    values, ids = sorted_tokens(logits)
    odds = odds_of(values, ChainRows(temperature, top_p, min_p, top_k.long(), chain, chances))
    found = torch.zeros_like(odds, dtype=torch.float64).scatter_(1, ids, odds.double())
    return (found / found.sum(dim=1, keepdim=True)).numpy()


@pytest.mark.parametrize("width", [0.5, 3.0, 12.0])
def test_probabilities_are_those_of_llama_cpp(width):
    """All kinds of rows in one step, half of them with forbidden tokens."""
    torch.manual_seed(7)
    sampling = CASES * 6
    logits = torch.randn(len(sampling), VOCAB) * width
    logits[::2, torch.randperm(VOCAB)[:100]] = -torch.inf
    found = probabilities(logits, sampling, 0.5)
    plain = np.stack([softmax(row) for row in logits.double().numpy()])
    for row, s in enumerate(sampling):
        expected = reference(logits[row].double().numpy(), s)
        np.testing.assert_allclose(found[row], expected, rtol=1e-4, atol=1e-9, err_msg=repr(s))
    assert (np.abs(found - plain).max(axis=1) > 1e-3).mean() > 0.5


@pytest.mark.parametrize(("first", "second"), list(pairwise(ORDER)))
def test_samplers_have_the_order_of_llama_cpp(first: str, second: str) -> None:
    """Of two neighbours alone, in which the other order gives other probabilities."""
    active = {
        "top_n_sigma": {"top_n_sigma": 1.2},
        "top_k": {"top_k": 30},
        "typical_p": {"typical_p": 0.7},
        "top_p": {"top_p": 0.8},
        "min_p": {"min_p": 0.1},
        "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.04},
        "temperature": {"temperature": 2.0},
    }
    torch.manual_seed(10)
    logits = torch.randn(8, VOCAB) * 2
    sampling = replace(PLAIN, **active[first], **active[second])
    rows = logits.double().numpy()
    expected = np.stack([reference(row, sampling) for row in rows])
    found = probabilities(logits, [sampling] * len(rows), 0.5)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-9)
    swapped = np.stack([reference(row, sampling, order=(second, first)) for row in rows])
    assert np.abs(swapped - expected).max() > 1e-3


@pytest.mark.parametrize(
    "lowered", [{"repeat_penalty": 2.0}, {"dry_multiplier": 2.0, "dry_allowed_length": 1}]
)
def test_penalties_and_dry_come_before_the_candidates_are_chosen(lowered: dict[str, float]) -> None:
    """Token 1 has the highest logit, and has followed token 2 before."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 1], logits[0, 5] = 2.0, 1.5
    history = [[2, 1, 7, 2]]
    for chosen in ({"top_k": 1}, {"top_n_sigma": 0.1}, {"typical_p": 1e-6, "top_k": 2}):
        sampling = replace(PLAIN, seed=3, **chosen)
        assert sample(logits.clone(), [sampling], tokens=history).tokens.tolist() == [1]
        sampling = replace(sampling, **lowered)
        assert sample(logits.clone(), [sampling], tokens=history).tokens.tolist() == [5]


def test_a_mass_of_0_leaves_one_token() -> None:
    torch.manual_seed(11)
    logits = torch.randn(4, VOCAB) * 3
    for chosen in ({"top_p": 0.0}, {"top_p": 0.0, "top_k": 40}):
        sampling = [replace(PLAIN, seed=seed, **chosen) for seed in range(4)]
        found = sample(logits.clone(), sampling).tokens
        assert found.tolist() == logits.argmax(dim=1).tolist()
    found = probabilities(logits, [replace(PLAIN, typical_p=0.0)] * 4, 0.5)
    assert (np.count_nonzero(found, axis=1) == 1).all()


@pytest.mark.parametrize("mass", [0.2, 0.7, 0.95])
def test_typical_sampling_is_that_of_transformers(mass):
    torch.manual_seed(8)
    logits = torch.randn(40, VOCAB) * 3
    found = probabilities(logits, [replace(PLAIN, typical_p=mass)] * 40, 0.5)
    expected = TypicalLogitsWarper(mass)(torch.zeros(40, 1, dtype=torch.long), logits)
    np.testing.assert_allclose(found, expected.softmax(dim=1).numpy(), rtol=1e-4, atol=1e-7)


def test_xtc_excludes_the_likely_tokens_with_its_probability():
    rows = 3_000
    torch.manual_seed(9)
    logits = torch.randn(VOCAB) * 3
    sampling = replace(PLAIN, xtc_probability=0.3, xtc_threshold=0.05)
    row = logits.double().numpy()
    with_xtc, without = (reference(row, sampling, excluding=each) for each in (True, False))
    assert np.abs(with_xtc - without).max() > 0.1
    expected = rows * (0.3 * with_xtc + 0.7 * without)
    drawn = sample(logits.repeat(rows, 1), [replace(sampling, seed=n) for n in range(rows)])
    observed = np.bincount(drawn.tokens.numpy(), minlength=VOCAB)
    common = expected >= 5
    observed = np.append(observed[common], observed[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    assert chi_square(observed, expected) < critical(len(expected) - 1)


def test_temperature_zero_takes_the_most_likely_candidate():
    """XTC leaves the second of two likely tokens; typical_p drops a token that is too likely."""
    logits = torch.log(torch.tensor([[0.4, 0.01, 0.4, *[0.19 / 297] * 297]])).repeat(2, 1)
    logits[1] = torch.log(torch.tensor([0.5, *[0.5 / 299] * 299]))
    cold = replace(PLAIN, temperature=0.0)
    sampling = [
        replace(cold, xtc_probability=1.0, xtc_threshold=0.1, seed=4),
        replace(cold, typical_p=0.2, seed=5),
    ]
    expected = [int(reference(row.numpy(), replace(s, temperature=1e-3)).argmax())
                for row, s in zip(logits.double(), sampling, strict=True)]  # fmt: skip
    assert expected[0] == 2
    assert sample(logits.clone(), sampling).tokens.tolist() == expected


def test_logits_that_are_not_finite_disturb_no_other_row():
    torch.manual_seed(10)
    logits = torch.randn(len(CASES), VOCAB)
    sampling = [replace(s, seed=n) for n, s in enumerate(CASES)]
    expected = sample(logits.clone(), sampling).tokens
    broken = torch.cat([logits, torch.full((2, VOCAB), torch.nan)])
    broken[-1] = -torch.inf
    drawn = sample(broken, [*sampling, *sampling[:2]])
    assert torch.equal(drawn.tokens[:-2], expected)
    assert drawn.finite.tolist() == [True] * len(CASES) + [False] * 2
    assert (drawn.tokens >= 0).all() and (drawn.tokens < VOCAB).all()


def test_the_chain_path_is_taken_only_for_parameters_with_an_effect():
    off = replace(PLAIN, top_n_sigma=-1.0, xtc_probability=1.0, xtc_threshold=0.6)
    assert path_of(off, VOCAB) is SamplingPath.WHOLE
    assert {path_of(s, VOCAB) for s in CASES} == {SamplingPath.CHAIN}
