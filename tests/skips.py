"""What a run of the tests has not tested."""

from collections import Counter
from collections.abc import Iterable

from pytest import CollectReport, TestReport


def skip_lines(skipped: Iterable[CollectReport | TestReport]) -> list[str]:
    """The number of skipped tests, or files of tests, for each reason; the most frequent first."""
    reasons = Counter(_reason(report) for report in skipped)
    return [f"skipped: {count} x {reason}" for reason, count in reasons.most_common()]


def _reason(report: CollectReport | TestReport) -> str:
    assert isinstance(report.longrepr, tuple)
    return report.longrepr[2].removeprefix("Skipped: ")
