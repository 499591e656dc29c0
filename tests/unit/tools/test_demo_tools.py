"""Held-out sums of the demo model occur in no training dialogue, with the tool or without it."""

import re
from collections.abc import Iterable
from itertools import islice

from tools import demo_dialogues, demo_tools

SUM = re.compile(r"(\d+) \+ (\d+) = \d+\.")
Pair = tuple[int, int]


def sums(messages: Iterable[demo_tools.Message]) -> set[Pair]:
    """The pairs of terms, the smaller one first, that answers of the assistant add."""
    said = (each["content"] for each in messages if each["role"] == "assistant")
    found = (SUM.fullmatch(text) for text in said)
    return {(min(pair), max(pair)) for m in found if m for pair in [(int(m[1]), int(m[2]))]}


def held_out_with_tool() -> set[Pair]:
    calls = [q for q in demo_tools.held_out(per_skill=200) if q.skill == "result"]
    return set.union(*(sums([{"role": "assistant", "content": q.answer}]) for q in calls))


def held_out_without_tool() -> set[Pair]:
    added = [q for q in demo_dialogues.held_out(per_skill=200) if q.skill == "addition"]
    return set.union(*(sums([{"role": "assistant", "content": q.answer}]) for q in added))


def test_training_with_the_tool_contains_no_held_out_sum():
    dialogues = islice(demo_tools.training_dialogues(1), 4000)
    trained = set.union(*(sums(each.messages) for each in dialogues))
    assert any(max(pair) <= demo_dialogues.LARGEST_TERM for pair in trained)
    assert not trained & held_out_without_tool()
    assert not trained & held_out_with_tool()


def test_training_without_the_tool_contains_no_sum_that_is_held_out_with_it():
    dialogues = islice(demo_dialogues.training_dialogues(1), 3000)
    trained = set.union(*(sums(each) for each in dialogues))
    held = held_out_with_tool()
    assert any(max(pair) <= demo_dialogues.LARGEST_TERM for pair in held)
    assert not trained & held
