"""Sampling: distribution, filters, and independence of other rows."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from runtime.engine.request import SamplingParams
from runtime.kernels.draws import draw_top_twin
from runtime.kernels.random_numbers import uniforms
from runtime.kernels.token_order import sorted_tokens, top_tokens
from runtime.worker import sampler
from runtime.worker.prompt_scores import TokenScores
from runtime.worker.repetition import RepeatingRows, longest_repeat
from runtime.worker.sampler import (
    TOP_LIMIT,
    Drawn,
    Draws,
    PenalisedRows,
    Sampler,
    SamplingPath,
    ScoredRows,
    path_of,
)
from tests.unit.runtime.worker.loaded_slots import load_slots

CPU = torch.device("cpu")
CONTEXT = 128


@pytest.fixture(autouse=True, params=["native", "torch"])
def drawing(request, monkeypatch) -> None:
    """Both ways to draw the most likely tokens."""
    if request.param == "torch":
        monkeypatch.setattr(sampler, "draw_top", draw_top_twin)


def sample(
    logits: Tensor,
    sampling: list[SamplingParams],
    *,
    positions: list[int] | None = None,
    tokens: list[list[int]] | None = None,
) -> Drawn:
    """One step in which row r belongs to slot r; the result is in the caller's order."""
    rows, vocab = logits.shape
    sampler = Sampler(slots=rows, context_tokens=CONTEXT, vocab_size=vocab, device=CPU)
    load_slots(sampler, sampling, tokens=tokens or ())
    if positions is None:
        positions = [len(given) for given in tokens] if tokens else [1] * rows
    order = sorted(range(rows), key=lambda row: path_of(sampling[row], vocab))
    drawn = sampler.sample(logits[order], draws_of(sampling, positions, order, vocab))
    back = torch.tensor(np.argsort(order))
    assert torch.equal(
        sampler.tokens_at(torch.arange(rows, dtype=torch.int32), torch.tensor(positions)),
        drawn.tokens[back],
    )
    scored = [row for row in order if sampling[row].logprobs is not None]
    scored_back, scores = torch.tensor(np.argsort(scored), dtype=torch.int64), drawn.scores
    if scores is not None:
        columns = scores.logprobs, scores.top_tokens, scores.top_logprobs
        scores = TokenScores(*(column[scored_back] for column in columns))
    return Drawn(drawn.tokens[back], drawn.finite[back], scores)


def draws_of(
    sampling: list[SamplingParams], positions: list[int], order: list[int], vocab: int
) -> Draws:
    ordered = [sampling[row] for row in order]
    paths = [path_of(s, vocab) for s in ordered]
    windows = [s.repeat_last_n or CONTEXT for s in ordered if s.penalised]
    penalised = torch.tensor([s.penalised for s in ordered]).nonzero()[:, 0]
    scored = torch.tensor([s.logprobs is not None for s in ordered]).nonzero()[:, 0]
    alternatives = max(s.logprobs or 0 for s in ordered)
    return Draws(
        slots=torch.tensor(order),
        positions=torch.tensor([positions[row] for row in order]),
        counts=tuple(paths.count(path) for path in SamplingPath),
        width=max(
            [s.top_k for s, p in zip(ordered, paths, strict=True) if p is SamplingPath.TOP] or [0]
        ),
        penalised=PenalisedRows(penalised, max(windows)) if windows else None,
        scored=ScoredRows(scored, alternatives) if len(scored) else None,
        repeating=repeating_rows(ordered),
    )


def repeating_rows(sampling: list[SamplingParams]) -> RepeatingRows | None:
    rows = [row for row, s in enumerate(sampling) if s.repetitive]
    longest = max((longest_repeat(sampling[row]) for row in rows), default=0)
    return RepeatingRows(torch.tensor(rows), CONTEXT, longest) if rows else None


def splitmix64(state: int):
    """The published generator, on Python's unbounded integers."""
    mask = 2**64 - 1
    while True:
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        yield z ^ (z >> 31)


def test_random_numbers_are_the_published_splitmix64_stream():
    published = splitmix64(1234567)
    assert [next(published) for _ in range(2)] == [6457827717110365317, 3203168211198807973]
    for seed in (0, 1, -1, 2**63 - 1, -(2**63), 987654321):
        stream = splitmix64(next(splitmix64(seed & (2**64 - 1))))
        expected = [(next(stream) >> 11) * 2.0**-53 for _ in range(300)]
        got = uniforms(torch.full((300,), seed), torch.arange(300))
        assert got.tolist() == expected


@pytest.mark.parametrize("varied", ["seed", "position"])
def test_random_numbers_are_uniform_and_unrelated_to_their_neighbours(varied):
    count, bins = 64_000, 64
    steps, fixed = torch.arange(count), torch.full((count,), 7)
    drawn = uniforms(steps, fixed) if varied == "seed" else uniforms(fixed, steps)
    assert drawn.min() >= 0 and drawn.max() < 1
    observed = torch.histc(drawn, bins, 0, 1).numpy()
    assert chi_square(observed, np.full(bins, count / bins)) < critical(bins - 1)
    pairs = np.histogram2d(drawn[:-1].numpy(), drawn[1:].numpy(), bins=8, range=[[0, 1]] * 2)[0]
    assert chi_square(pairs.ravel(), np.full(64, (count - 1) / 64)) < critical(63)


def chi_square(observed, expected) -> float:
    return float((((observed - expected) ** 2) / expected).sum())


def critical(freedom: int) -> float:
    """The 99.99% point of chi-square (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


def transformers_probabilities(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """logits [vocab] -> the distribution that transformers draws from."""
    warpers = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    scores = logits[None].double()
    for warper in warpers:
        scores = warper(torch.zeros(1, 1, dtype=torch.long), scores)
    return scores.softmax(dim=1)[0]


DISTRIBUTIONS = [
    SamplingParams(temperature=1.0, top_k=0, top_p=1.0),
    SamplingParams(temperature=0.5, top_k=0, top_p=1.0),
    SamplingParams(temperature=1.3, top_k=0, top_p=1.0, min_p=0.1),
    SamplingParams(temperature=1.0, top_k=7, top_p=1.0),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
    SamplingParams(temperature=1.5, top_k=20, top_p=0.9, min_p=0.2),
    SamplingParams(temperature=1.0, top_k=0, top_p=0.7),
    SamplingParams(temperature=2.0, top_k=0, top_p=0.95, min_p=0.05),
    SamplingParams(temperature=1.0, top_k=TOP_LIMIT + 10, top_p=1.0),
    SamplingParams(temperature=1.0, top_k=40, top_p=0.0),
]


@pytest.mark.parametrize("sampling", DISTRIBUTIONS, ids=repr)
def test_frequencies_over_many_seeds_are_those_of_transformers(sampling):
    rows = 2_500
    torch.manual_seed(1)
    logits = torch.randn(330) * 3
    expected = transformers_probabilities(logits, sampling).numpy() * rows
    variants = [replace(sampling, seed=seed) for seed in range(rows)]
    drawn = sample(logits.repeat(rows, 1), variants)
    observed = np.bincount(drawn.tokens.numpy(), minlength=330)
    assert observed[expected == 0].sum() == 0, "a token was drawn that the filters drop"
    common = expected >= 5
    rare = (observed[~common].sum(), expected[~common].sum())
    observed, expected = observed[common], expected[common]
    if rare[1] >= 5:
        observed, expected = np.append(observed, rare[0]), np.append(expected, rare[1])
    if len(expected) == 1:
        assert observed[0] == rows
    else:
        assert chi_square(observed, expected) < critical(len(expected) - 1)


@pytest.mark.parametrize("top_k", [0, 40])
def test_top_p_keeps_tokens_until_their_sum_exceeds_it(top_k):
    logits = torch.tensor([[-30.0, 1.0, -30.0, 1.0]]).repeat(100, 1)
    for top_p, kept in ((0.49, {1}), (0.5, {1, 3})):
        sampling = [SamplingParams(top_k=top_k, top_p=top_p, seed=seed) for seed in range(100)]
        assert set(sample(logits, sampling).tokens.tolist()) == kept


def inverse_cdf(logits: np.ndarray, sampling: SamplingParams, noise: float) -> int:
    """Top-k, temperature, softmax, top-p, min-p, draw: one step after the other, one row."""
    order = np.argsort(-logits, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    scaled = logits[order].astype(np.float64) / sampling.temperature
    chances = np.exp(scaled - scaled[0])
    chances /= chances.sum()
    length = int(np.searchsorted(np.cumsum(chances), sampling.top_p, side="right")) + 1
    order, chances = order[:length], chances[:length]
    kept = chances >= sampling.min_p * chances[0]
    order, chances = order[kept], chances[kept]
    sums = np.cumsum(chances)
    return int(order[np.searchsorted(sums, noise * sums[-1], side="right")])


def test_every_token_is_the_one_a_row_by_row_reference_draws():
    torch.manual_seed(2)
    rows, vocab = 400, 700
    logits = torch.randn(rows, vocab) * 4
    choices = [s for s in DISTRIBUTIONS if s.top_k or s.top_p < 1]  # those that order tokens
    sampling = [replace(choices[row % len(choices)], seed=row * 31) for row in range(rows)]
    positions = [row % CONTEXT for row in range(rows)]
    noise = uniforms(torch.tensor([s.seed for s in sampling]), torch.tensor(positions))
    expected = [
        inverse_cdf(logits[row].numpy(), sampling[row], float(noise[row])) for row in range(rows)
    ]
    assert sample(logits, sampling, positions=positions).tokens.tolist() == expected


@pytest.mark.parametrize("xtc", [0.0, 0.5])
def test_random_numbers_go_on_where_tokens_have_left_the_context(xtc):
    logits = torch.randn(1, 700, generator=torch.Generator().manual_seed(3)).repeat(60, 1)
    rules = SamplingParams(top_k=40, top_p=0.95, seed=5, xtc_probability=xtc, xtc_threshold=0.01)
    whole = sample(logits.clone(), [rules] * 60, positions=[*range(60)]).tokens
    shifted = [replace(rules, dropped=20 * (row > 30)) for row in range(60)]
    places = [row - shifted[row].dropped for row in range(60)]
    assert torch.equal(sample(logits.clone(), shifted, positions=places).tokens, whole)
    assert whole.unique().numel() > 5


def test_temperature_zero_takes_the_first_maximum_for_any_other_options():
    logits = torch.zeros(3, 200)
    logits[1, [150, 63, 64]] = 2.0
    logits[2, 199] = 1e-3
    sampling = [SamplingParams(temperature=0.0, top_k=5, top_p=0.1, seed=s) for s in (1, 2, 3)]
    assert sample(logits, sampling).tokens.tolist() == [0, 63, 199]


def company(vocab: int) -> list[SamplingParams]:
    """Rows of every kind, with widths and windows that differ."""
    rows = []
    for seed in range(8):
        rows += [
            SamplingParams(temperature=0.0, seed=seed),
            SamplingParams(temperature=0.7, top_k=1 + 5 * seed, seed=seed),
            SamplingParams(temperature=1.5, top_k=TOP_LIMIT - seed, top_p=1.0, seed=seed),
            SamplingParams(temperature=1.0, top_k=TOP_LIMIT + 1 + seed, top_p=0.99, seed=seed),
            SamplingParams(temperature=1.0, top_k=0, top_p=0.95, seed=seed),
            SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.01, seed=seed),
            SamplingParams(repeat_penalty=1.3, repeat_last_n=1 + seed, seed=seed),
            SamplingParams(frequency_penalty=0.5, repeat_last_n=None, top_k=vocab, seed=seed),
            SamplingParams(dry_multiplier=1.0, dry_allowed_length=0, seed=seed),
            SamplingParams(typical_p=0.9, top_k=0, repeat_penalty=1.1, seed=seed),
            SamplingParams(top_n_sigma=1.5, dynatemp_range=0.5, dynatemp_exponent=1.3, seed=seed),
            SamplingParams(xtc_probability=0.7, xtc_threshold=0.02, top_k=0, min_p=0.01, seed=seed),
        ]
    return rows


def test_a_row_gives_the_same_token_alone_in_a_batch_and_in_another_order():
    torch.manual_seed(3)
    vocab = 3001
    sampling = company(vocab)
    rows = len(sampling)
    logits = (torch.randn(rows, vocab) * 12).round() / 4  # many equal logits
    tokens = torch.randint(vocab, (rows, 50)).tolist()
    crowd = sample(logits.clone(), sampling, tokens=tokens).tokens.tolist()
    back = list(range(rows))[::-1]
    turned = sample(
        logits[back], [sampling[r] for r in back], tokens=[tokens[r] for r in back]
    ).tokens.tolist()
    alone = [
        sample(logits[r : r + 1].clone(), [sampling[r]], tokens=[tokens[r]]).tokens.item()
        for r in range(rows)
    ]
    assert crowd == alone == turned[::-1]


def test_a_token_depends_on_seed_and_position():
    torch.manual_seed(4)
    logits = torch.randn(1, 500).repeat(60, 1)
    wide = SamplingParams(temperature=1.0, top_k=0, top_p=1.0)
    by_seed = sample(logits, [replace(wide, seed=n) for n in range(60)]).tokens
    by_position = sample(logits, [wide] * 60, positions=list(range(60))).tokens
    assert len(set(by_seed.tolist())) > 30 and len(set(by_position.tolist())) > 30


def test_any_integer_is_a_seed_and_its_low_64_bits_count():
    logits = torch.randn(4, 500)[:1].repeat(4, 1)
    wide = SamplingParams(temperature=1.0, top_k=0, top_p=1.0)
    seeds = [-1, 2**64 - 1, 2**200 + 5, 5]
    tokens = sample(logits, [replace(wide, seed=seed) for seed in seeds]).tokens
    assert torch.equal(tokens[::2], tokens[1::2])


def penalised(logits: np.ndarray, tokens: list[int], sampling: SamplingParams) -> np.ndarray:
    """llama.cpp's penalties on one row; the additive ones skip what `counted_from` excludes."""
    result = logits.copy()
    last = len(tokens) if sampling.repeat_last_n is None else sampling.repeat_last_n
    begin = len(tokens) - min(last, len(tokens))
    seen, factor = sorted(set(tokens[begin:])), np.float32(sampling.repeat_penalty)
    result[seen] = np.where(result[seen] <= 0, result[seen] * factor, result[seen] / factor)
    counted = tokens[max(begin, sampling.counted_from) :]
    for token, count in Counter(counted).items():
        result[token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    return result


def test_penalties_choose_as_llama_cpp_does():
    torch.manual_seed(5)
    rows, vocab = 300, 24
    # A positive logit is divided by the repeat penalty, a negative one multiplied: each decides.
    logits = torch.randn(rows, vocab) * 2 - torch.tensor([0.0, 10.0])[torch.arange(rows) % 2, None]
    kinds = [
        {"repeat_penalty": 1.5},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 0.6},
        {"repeat_penalty": 0.7, "presence_penalty": -0.5, "frequency_penalty": 0.3},
        {},
    ]
    lasts = [None, 0, 1, 5, 64, 1000]
    begins = [0, 0, 0, 3, 8, 20, 40]  # the last ones often beyond everything there is
    sampling = [
        SamplingParams(0.0, repeat_last_n=lasts[r % 6], counted_from=begins[r % 7], **kinds[r % 5])
        for r in range(rows)
    ]
    tokens = [torch.randint(vocab, (1 + r % 40,)).tolist() for r in range(rows)]
    cases = zip(logits.numpy(), tokens, sampling, strict=True)
    expected = [int(penalised(*case).argmax()) for case in cases]
    assert expected != logits.argmax(dim=1).tolist()
    assert sample(logits, sampling, tokens=tokens).tokens.tolist() == expected


@pytest.mark.parametrize("more", [{}, {"frequency_penalty": 2.0, "counted_from": 12}])
@pytest.mark.parametrize("mean", [0.0, -10.0])
def test_repeat_penalty_over_the_whole_sequence_is_that_of_transformers(more, mean):
    torch.manual_seed(6)
    logits, tokens = torch.randn(50, 40) * 3 + mean, torch.randint(40, (50, 12))
    reference = RepetitionPenaltyLogitsProcessor(1.8)(tokens, logits.clone()).argmax(dim=1)
    sampling = SamplingParams(temperature=0.0, repeat_penalty=1.8, repeat_last_n=None, **more)
    assert torch.equal(sample(logits, [sampling] * 50, tokens=tokens.tolist()).tokens, reference)


def test_log_probabilities_are_those_of_the_raw_logits():
    torch.manual_seed(7)
    logits = torch.randn(6, 333) * 2
    sampling = [
        SamplingParams(logprobs=5, temperature=0.3),
        SamplingParams(),
        SamplingParams(logprobs=0, top_k=0),
        SamplingParams(logprobs=20, temperature=0.0, repeat_penalty=3.0),
        SamplingParams(logprobs=1, frequency_penalty=2.0, top_k=0, top_p=1.0),
        SamplingParams(repeat_penalty=2.0),
    ]
    tokens = [logits[row].topk(30).indices.tolist() for row in range(6)]
    expected = logits.log_softmax(dim=1)
    drawn = sample(logits.clone(), sampling, tokens=tokens)
    for place, row in enumerate([0, 2, 3, 4]):
        chosen = expected[row, drawn.tokens[row]]
        torch.testing.assert_close(drawn.scores.logprobs[place], chosen, atol=1e-5, rtol=0)
        wanted = sampling[row].logprobs
        best = expected[row].topk(wanted)
        torch.testing.assert_close(
            drawn.scores.top_logprobs[place, :wanted], best.values, atol=1e-5, rtol=0
        )
        assert torch.equal(drawn.scores.top_tokens[place, :wanted], best.indices)
    alone = sample(logits[3:4].clone(), sampling[3:4], tokens=tokens[3:4])
    assert torch.equal(alone.scores.logprobs[0], drawn.scores.logprobs[2])


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")], ids=str)
def test_a_row_that_is_not_finite_is_reported_and_the_others_are_not(bad):
    sampling = [s for s in company(900)[:8] for _ in range(2)]
    torch.manual_seed(8)
    logits = torch.randn(16, 900)
    logits[::2, 777] = bad
    drawn = sample(logits, sampling, tokens=[[1, 2, 3]] * 16)
    assert drawn.finite.tolist() == [False, True] * 8


def test_a_row_without_any_possible_token_is_reported():
    logits, tokens = torch.full((8, 100), -torch.inf), [[1, 2, 3]] * 8
    assert not sample(logits, company(100)[:8], tokens=tokens).finite.any()


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1000, 4096])
@pytest.mark.parametrize("count", [1, 3, 64, 200])
def test_the_top_tokens_are_ordered_by_value_and_then_by_id(vocab, count):
    torch.manual_seed(vocab)
    for logits in (
        torch.randn(4, vocab),
        (torch.randn(4, vocab) * 2).round(),
        torch.zeros(4, vocab),
    ):
        logits[0, ::3] = -torch.inf
        logits[1, ::2] *= -1.0  # zeros of both signs
        for values, ids, limit in (
            (*top_tokens(logits, count), min(count, vocab)),
            (*sorted_tokens(logits), vocab),
        ):
            for row in range(4):
                given = logits[row].tolist()
                expected = sorted(range(vocab), key=lambda i, g=given: (-g[i], i))[:limit]
                assert ids[row].tolist() == expected
                assert values[row].tolist() == [given[i] for i in expected]


def test_workspace_of_the_widest_step_is_within_what_is_reserved():
    rows, vocab = 12, 40_000
    sampling = [SamplingParams(top_k=0, repeat_penalty=1.1, repeat_last_n=None, logprobs=20)] * rows
    logits, tokens = torch.randn(rows, vocab), [[1] * 100] * rows
    with torch.profiler.profile(profile_memory=True) as profile:
        sample(logits, sampling, tokens=tokens)
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert peak > 8 * vocab
    assert peak <= Sampler.workspace_bytes(rows=rows, context_tokens=CONTEXT, vocab_size=vocab)
