"""Allowed tokens and bad words in the sampler, against vLLM's definition of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from runtime.engine.request import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams
from runtime.kernels import draws as draw_kernels
from runtime.worker.restrictions import RestrictedRows, longest_word
from runtime.worker.sampler import Sampler, path_of
from tests.unit.runtime.worker.loaded_slots import load_slots
from tests.unit.runtime.worker.test_logit_biases import PATHS
from tests.unit.runtime.worker.test_sampler import CONTEXT, CPU, draws_of

VOCAB = 600
PROMPT = 5  # tokens, which are not part of bad words


@pytest.fixture(autouse=True, params=["native", "torch"])
def forbidding(request, monkeypatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(draw_kernels, "library", lambda: None)


def mask_of(tokens: list[int]) -> bytes:
    return np.packbits(np.isin(np.arange(608), tokens), bitorder="little").tobytes()


ALL = mask_of(list(range(VOCAB)))


def sampled(
    logits: torch.Tensor, sampling: list[SamplingParams], histories: list[list[int]]
) -> tuple[list[int], list[bool]]:
    """Tokens and `finite` of one step, row r for slot r; checks that log-probabilities are raw."""
    rows = len(sampling)
    sampler = Sampler(slots=rows, context_tokens=CONTEXT, vocab_size=VOCAB, device=CPU)
    load_slots(sampler, sampling, tokens=histories)
    order = sorted(range(rows), key=lambda row: path_of(sampling[row], VOCAB))
    ordered = [sampling[row] for row in order]
    restricted = RestrictedRows(
        torch.tensor([row for row, s in enumerate(ordered) if s.restricted], dtype=torch.int64),
        max(len(s.bad_words) for s in ordered),
        max(map(longest_word, ordered)),
        any(s.allowed for s in ordered),
    )
    plain = draws_of(sampling, list(map(len, histories)), order, VOCAB)
    drawn = sampler.sample(logits[order], replace(plain, restricted=restricted))
    raw = logits[order].log_softmax(1).gather(1, drawn.tokens[:, None])[:, 0]
    torch.testing.assert_close(drawn.scores.logprobs, raw)
    back = np.argsort(order)
    return drawn.tokens[back].tolist(), drawn.finite[back].tolist()


def forbidden_by_vllm(bad_words: tuple[tuple[int, ...], ...], answer: list[int]) -> list[int]:
    """The last tokens of the words whose other tokens the answer ends with."""
    found = []
    for word in bad_words:
        before = len(word) - 1
        if len(word) <= len(answer) + 1 and answer[len(answer) - before :] == list(word[:-1]):
            found.append(word[-1])
    return found


def random_words(r: np.random.Generator, answer: list[int]) -> tuple[tuple[int, ...], ...]:
    """Some begin with what the answer ends with."""
    words = []
    for _ in range(r.integers(0, 9)):
        length = int(r.integers(0, 5))
        begin = answer[len(answer) - length :] if length <= len(answer) else [9] * length
        if r.random() < 0.3 and begin:
            begin[r.integers(len(begin))] += 1
        words.append((*begin, int(r.integers(8))))
    return tuple(words)


@pytest.mark.parametrize("path", PATHS)
def test_the_token_is_that_of_logits_without_the_forbidden_ones(path: str) -> None:
    """Rows with and without restrictions are in one step. Few tokens are likely."""
    r = np.random.default_rng(3)
    torch.manual_seed(1)
    rows = 60
    logits = torch.randn(rows, VOCAB)
    logits[:, :8] += 6.0
    plain = [replace(PATHS[path], seed=row) for row in range(rows)]
    changed, restricted, histories = logits.clone(), [], []
    for row, sampling in enumerate(plain):
        answer = r.integers(0, 3, r.integers(0, 7)).tolist()
        histories.append([*r.integers(0, 3, PROMPT).tolist(), *answer])
        words = random_words(r, answer)
        allowed = b""
        if row % 3 == 0:
            tokens = r.choice(VOCAB, 40, replace=False).tolist()
            allowed = mask_of(tokens)
            changed[row, [token for token in range(VOCAB) if token not in tokens]] = -torch.inf
        changed[row, forbidden_by_vllm(words, answer)] = -torch.inf
        restricted.append(replace(sampling, bad_words=words, allowed=allowed, words_from=PROMPT))
    expected, _ = sampled(changed, [replace(s, allowed=ALL) for s in plain], histories)
    found, finite = sampled(logits, restricted, histories)
    assert found == expected and all(finite)
    free, _ = sampled(logits, [replace(s, allowed=ALL) for s in plain], histories)
    assert sum(one != other for one, other in zip(free, found, strict=True)) > rows // 4


def test_the_largest_tables_are_used_whole() -> None:
    """Of the words only the last one, of the tokens of which the first one is read, applies."""
    history = [7, *range(1, MAX_BAD_WORD_TOKENS)]
    word = (*history[1:], 3)
    others = tuple((n, *word[1:-1], 4) for n in range(100, 99 + MAX_BAD_WORDS))
    sampling = replace(PATHS["greedy"], bad_words=(*others, word), words_from=1)
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 4], logits[0, 5] = 5.0, 4.0, 3.0
    assert sampled(logits, [sampling], [history]) == ([4], [True])
    assert sampled(logits, [replace(sampling, words_from=2)], [history]) == ([3], [True])


def test_a_row_without_a_token_left_is_reported_and_disturbs_no_other() -> None:
    torch.manual_seed(2)
    logits = torch.randn(len(PATHS), VOCAB)
    plain = [replace(s, allowed=ALL) for s in PATHS.values()]
    expected, _ = sampled(logits, plain, [[1]] * len(plain))
    none = replace(plain[0], allowed=mask_of([5, 9]), bad_words=((5,), (9,)))
    found, finite = sampled(torch.cat([logits, logits[:1]]), [*plain, none], [[1]] * 6)
    assert found[:-1] == expected and finite == [True] * 5 + [False]
