"""Biased and barred tokens in the sampler."""

from dataclasses import replace

import pytest
import torch

from runtime.engine.request import MAX_BARRED_TOKENS, MAX_LOGIT_BIASES, SamplingParams
from runtime.worker.logit_biases import BiasedRows, used_entries
from runtime.worker.sampler import Sampler, path_of
from tests.unit.runtime.worker.loaded_slots import load_slots
from tests.unit.runtime.worker.test_sampler import CONTEXT, CPU, draws_of

VOCAB = 600
PATHS = {
    "greedy": SamplingParams(temperature=0.0, logprobs=0),
    "top k": SamplingParams(top_k=40, seed=3, logprobs=0),
    "top p": SamplingParams(top_k=0, top_p=0.9, seed=4, logprobs=0),
    "all": SamplingParams(top_k=0, top_p=1.0, seed=5, logprobs=0),
    "penalties": SamplingParams(temperature=0.0, repeat_penalty=1.5, logprobs=0),
}


def sampled(logits: torch.Tensor, sampling: list[SamplingParams], position: int = 1) -> list[int]:
    """The tokens of one step, row r for slot r; checks that log-probabilities are the raw ones."""
    rows = len(sampling)
    sampler = Sampler(slots=rows, context_tokens=CONTEXT, vocab_size=VOCAB, device=CPU)
    load_slots(sampler, sampling)
    order = sorted(range(rows), key=lambda row: path_of(sampling[row], VOCAB))
    ordered = [sampling[row] for row in order]
    biased = BiasedRows(
        torch.tensor([s.biased for s in ordered]).nonzero()[:, 0], max(map(used_entries, ordered))
    )
    draws = replace(draws_of(sampling, [position] * rows, order, VOCAB), biased=biased)
    drawn = sampler.sample(logits[order], draws)
    raw = logits[order].log_softmax(1).gather(1, drawn.tokens[:, None])[:, 0]
    torch.testing.assert_close(drawn.scores.logprobs, raw)
    found = dict(zip(order, drawn.tokens.tolist(), strict=True))
    return [found[row] for row in range(rows)]


@pytest.mark.parametrize("path", PATHS)
def test_the_token_is_that_of_changed_logits(path):
    """The reference changes the logits themselves. Rows with and without biases are in one step."""
    torch.manual_seed(1)
    rows = 40
    logits = torch.randn(rows, VOCAB) * 3
    plain = [replace(PATHS[path], seed=row) for row in range(rows)]
    changed, biased = logits.clone(), []
    for row, sampling in enumerate(plain):
        tokens = torch.randperm(VOCAB)[: row % 7].tolist()
        bias = tuple((token, float(3 * n - 5)) for n, token in enumerate(tokens))
        for token, value in bias:
            changed[row, token] += value
        biased.append(replace(sampling, logit_bias=bias))
    expected = sampled(changed, plain)
    assert sampled(logits, biased) == expected
    assert expected != sampled(logits, plain)


@pytest.mark.parametrize("path", PATHS)
def test_barred_tokens_are_drawn_from_their_position_on(path):
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 60.0
    barred = replace(PATHS[path], barred=(7, 9), barred_until=5, logit_bias=((7, 2.0),))
    found = {position: sampled(logits, [barred], position) for position in (1, 4, 5, 90)}
    assert [found[position] == [7] for position in found] == [False, False, True, True]


def test_all_entries_of_a_request_count():
    """The last of each kind decides, behind as many others as a request may have."""
    logits = torch.zeros(1, VOCAB)
    logits[0, VOCAB - 1], logits[0, VOCAB - 2] = 50.0, 30.0
    sampling = SamplingParams(
        temperature=0.0,
        logprobs=0,
        logit_bias=tuple((n, 10.0 * (n == MAX_LOGIT_BIASES - 1)) for n in range(MAX_LOGIT_BIASES)),
        barred=tuple(range(VOCAB - MAX_BARRED_TOKENS, VOCAB)),
        barred_until=2,
    )
    assert sampled(logits, [sampling]) == [MAX_LOGIT_BIASES - 1]
