"""What the published ratios pass through: the clock of decoding, and rounds in turn."""

import pytest

from bench import contender
from bench.contender import Clock, Decoding, Prompts, in_turns, isolated
from bench.report import Row, comparison, with_spread


def test_tokens_count_from_when_all_sequences_decode(monkeypatch) -> None:
    """The first tokens of prompts are of no use for a speed of decoding."""
    now_s = 100.0
    monkeypatch.setattr(contender.time, "perf_counter", lambda: now_s)
    clock = Clock(2)
    clock.saw(0, 1)
    clock.saw(0, 3)
    now_s = 107.0
    clock.saw(1, 1)  # the prompt of the second one has ended
    now_s = 109.0
    clock.saw(0, 2)
    clock.saw(1, 3)
    assert clock.stop() == Decoding(5, 2.0)
    assert Decoding(5, 2.0).tokens_per_second == 2.5


def test_a_sequence_that_never_began_is_no_measurement() -> None:
    clock = Clock(2)
    clock.saw(1, 1)
    with pytest.raises(AssertionError, match="never began"):
        clock.stop()


def test_contenders_take_turns_at_being_first_and_values_stay_in_pairs() -> None:
    seen: list[str] = []

    def measure(which: str) -> float:
        seen.append(which)
        return len(seen) + (0.5 if which == "b" else 0.0)

    first, second = in_turns(measure, "a", "b", 3)
    assert seen == ["a", "b", "b", "a", "a", "b"]
    assert (first, second) == ((1.0, 4.0, 5.0), (2.5, 3.5, 6.5))


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    row = Row("m", "t", "tokens/s", (10.0, 30.0, 80.0), (10.0, 10.0, 100.0))
    assert row.ratio == 1.0  # of 1.0, 3.0 and 0.8; the medians' ratio would be 3.0
    shown = "| m | t | tokens/s | 3 | 30.0 ±167% | 10.0 ±900% | 1.00 |"
    assert comparison([row], "a", "b").splitlines()[-1] == shown
    assert with_spread((2.0,)) == "2.0"


@pytest.mark.parametrize("vocab_size", [1024, 32_000, 150_000])
def test_prompts_have_tokens_of_the_vocabulary_alone(vocab_size: int) -> None:
    drawn = Prompts(vocab_size).draw(2000)
    assert min(drawn) >= 256 and max(drawn) < vocab_size


class Adder:
    def __init__(self, start: int) -> None:
        self._sum = start

    def add(self, number: int) -> int:
        self._sum += number
        return self._sum

    def close(self) -> None:
        pass


def test_an_isolated_contender_has_the_public_methods_of_its_class() -> None:
    adder = isolated(Adder, start=3)
    assert [adder.add(1), adder.add(2)] == [4, 6]
    assert not hasattr(adder, "_sum")
    adder.close()
