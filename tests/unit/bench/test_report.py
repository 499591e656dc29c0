"""The goals beside the ratios to llama.cpp."""

from bench.make_model import LABELS, MOE
from bench.report import Row, goal, with_goals

TASKS = ("prefill, 512 tokens", "decode, 1 sequence", "decode, 4 sequences", "decode, 16 sequences")


def test_every_model_of_the_table_has_its_goals() -> None:
    assert all(goal(label, task) >= 1 for label in (*LABELS, MOE) for task in TASKS)
    assert [goal("Q8_0", task) for task in TASKS] == [1.8, 1.0, 1.5, 1.5]
    assert goal("Q4_0", "decode, 1 sequence after 8,192 tokens") == 1.0


def test_the_goal_is_the_last_column_of_its_row() -> None:
    rows = [Row("Q5_K", task, "tokens/s", (3.0,), (2.0,)) for task in TASKS]
    head, line, *body = with_goals(rows).splitlines()
    assert head.endswith(" caravan / llama.cpp | goal |")
    assert {text.count("|") for text in (head, line, *body)} == {9}
    assert [text.split("|")[-3:-1] for text in body] == [
        [" 1.50 ", f" {wanted} "] for wanted in ("1.2", "1.0", "1.1", "1.1")
    ]
