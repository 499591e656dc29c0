"""Skipped tests are counted by reason at the end of a run."""

from pytest import CollectReport, TestReport

from tests.skips import skip_lines


def test_skipped_tests_and_files_are_counted_by_reason() -> None:
    def skipped(line: int, reason: str) -> TestReport:
        place = ("test_a.py", line, f"Skipped: {reason}")
        return TestReport("test_a.py::a", ("a.py", line, "a"), {}, "skipped", place, "call")

    whole = CollectReport("b.py", "skipped", ("b.py", 1, "Skipped: no compiler"), [])
    reports = [skipped(1, "no data"), whole, skipped(2, "no compiler"), skipped(3, "no compiler")]
    assert skip_lines(reports) == ["skipped: 3 x no compiler", "skipped: 1 x no data"]
    assert skip_lines([]) == []
