"""The leak check of `make soak` finds leaks of each kind, and no others."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.soak.growth import FEWEST, MIB, Held, check_growth, growth, held_now

ROUNDS = FEWEST
REQUESTS = 32


@pytest.fixture(scope="module", autouse=True)
def without_other_objects() -> None:
    """What other tests left is not searched for garbage before each measurement."""
    gc.collect()
    gc.freeze()


class Kept:
    """What a request leaves behind."""


def measured(work: Callable[[int], object]) -> list[Held]:
    """Rounds that also allocate and free 8 MiB."""
    found = []
    for round in range(ROUNDS):
        torch.ones(2 * MIB).sum()
        work(round)
        found.append(held_now())
    return found


@pytest.mark.parametrize(
    ("leak", "name"),
    [
        (lambda: [Kept() for _ in range(REQUESTS)], "blocks|objects"),
        (lambda: [bytes(40) for _ in range(REQUESTS)], "blocks"),
        (lambda: torch.ones(MIB // 4), "resident_bytes"),  # one MiB in one object
    ],
)
def test_a_leak_of_each_round_is_found(leak: Callable[[], Any], name: str) -> None:
    kept = []
    with pytest.raises(AssertionError, match=name):
        check_growth(measured(lambda round: kept.append(leak())))


def test_garbage_and_a_cache_that_is_filled_early_are_no_leaks() -> None:
    cache: dict[int, Any] = {}

    def work(round: int) -> None:
        cycle: list[Any] = [bytes(1000)] * 100
        cycle.append(cycle)
        cache[round % 3] = torch.ones(MIB)
        if round == ROUNDS // 6:
            cache[-1] = [Kept() for _ in range(1000)]

    check_growth(measured(work))


def test_too_few_rounds_are_an_error() -> None:
    with pytest.raises(AssertionError, match="too few"):
        check_growth([held_now()] * (FEWEST - 1))


def rising(by: float) -> Iterator[Held]:
    return (Held(100 + by * round, 5, 5) for round in range(21))


def test_growth_is_per_round_and_one_outlier_does_not_change_it() -> None:
    found = list(rising(3.0))
    found[15] = Held(10_000, 5, 5)
    assert growth(found) == Held(3.0, 0, 0)
