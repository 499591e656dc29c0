"""The index finds what a search of the whole sequence finds."""

import random

import pytest

from runtime.engine import ngram_index
from runtime.engine.ngram_index import CANDIDATES, MIN_MATCH, NGramIndex


def continuation(tokens: list[int], most: int) -> tuple[int, ...]:
    """The specification: the latest of the longest earlier occurrences."""
    for length in range(min(ngram_index.LONGEST_MATCH, len(tokens) - 1), MIN_MATCH - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                period = len(tokens) - end
                return tuple(tokens[end + n % period] for n in range(most))
    return ()


def test_continuations_are_those_of_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_index, "CANDIDATES", 1000)
    r, found = random.Random(1), 0
    for trial in range(12):
        letters, tokens = r.choice([2, 3, 9]), list[int]()
        index = NGramIndex(tokens, most_tokens=200)
        for _ in range(120):
            tokens += [r.randrange(letters) * 70_000 for _ in range(r.choice([1, 1, 3]))]
            while index.extend(2):
                pass
            expected = continuation(tokens, 5)
            assert index.continuation(5) == expected, trial
            found += bool(expected)
    assert found > 200


def test_nothing_is_found_until_all_places_are_indexed() -> None:
    tokens = [1, 2, 3, 4] * 5
    index = NGramIndex(tokens, most_tokens=100)
    assert index.extend(10) == 10 and index.continuation(3) == ()
    assert index.extend(10) == 7 and index.continuation(3) == (1, 2, 3)


def test_only_the_newest_places_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_index, "MOST_PLACES", 64)
    start = [500, 501, 502, 503]
    for between, expected in ((40, (503,)), (90, ())):
        tokens = [*start, *range(between), *start[:3]]
        index = NGramIndex(tokens, most_tokens=10_000)
        while index.extend(16):
            pass
        assert index.continuation(1) == expected


def test_a_search_compares_few_places() -> None:
    """All tokens equal is what most places have the same hash for."""
    comparisons = 0

    class Counted(list[int]):
        def __getitem__(self, key):
            nonlocal comparisons
            comparisons += 1
            return super().__getitem__(key)

    tokens = Counted([7] * 5000)
    index = NGramIndex(tokens, most_tokens=5000)
    index.extend(5000)
    comparisons = 0
    index.continuation(8)
    assert comparisons <= 2 * CANDIDATES * ngram_index.LONGEST_MATCH + 20
