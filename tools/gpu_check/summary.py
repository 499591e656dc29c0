"""What is printed: states of sections, goals, failed checks, figures."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

MOST_CHARACTERS = 12_000
_MOST_FAILURES = 12  # of a section
_LINE = 300
_NO_FACTS = ("kind", "name", "passed", "device", "process")


def summary(found: Mapping[str, Mapping[str, Any]], machine: str, path: str) -> str:
    """At most MOST_CHARACTERS; states come first, so that only figures are cut off."""
    kept, length = list[str](), 0
    lines = [machine, *_states(found), *_goals(found), *_failures(found), *_figures(found)]
    for line in lines:
        length += len(line[:_LINE]) + 1
        if length > MOST_CHARACTERS - 100 - len(path):
            kept.append(f"... {len(lines) - len(kept)} lines more")
            break
        kept.append(line[:_LINE])
    return "\n".join([*kept, f"all of it: {path}"])


def _states(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, result in found.items():
        checks = [row for row in result["rows"] if row["kind"] == "check"]
        passed = sum(row["passed"] for row in checks)
        counted = f"{passed} of {len(checks)} checks passed, {result['seconds']} s"
        yield f"{name}: {result['state']} ({counted})"


def _goals(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for result in found.values():
        for row in result["rows"]:
            if row.get("goal") is not None:
                bound, number = row["goal"]
                yield f"goal / measured: {row['name']}: {bound} {number:g} / {_measured(row)}"


def _measured(row: Mapping[str, Any]) -> str:
    """Of a row with a goal."""
    if row["kind"] == "skipped":
        return f"skipped: {row['reason']}"
    bound, number = row["goal"]
    value = row["value"]
    if value is None:
        return "no figure"
    reached = value >= number if bound == "at least" else value <= number
    state = "reached" if reached else "missed"
    shown = f"{value:g} {row['unit']}".rstrip()
    return f"{shown}, {state} (device {row['device']})"


def _failures(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, result in found.items():
        failed = _by_process([row for row in result["rows"] if not row.get("passed", True)])
        for row in failed[:_MOST_FAILURES]:
            facts = {k: v for k, v in row.items() if k not in _NO_FACTS}
            yield f"  FAILED {name}: {row['name']}: {facts}"
        if len(failed) > _MOST_FAILURES:
            yield f"  FAILED {name}: {len(failed) - _MOST_FAILURES} checks more"
        if result["state"].startswith(("ended", "exceeded", "gave")):
            last = result["output"].strip().splitlines()[-1:]
            yield f"  {name}: last line of its output: {''.join(last)}"


def _by_process(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The first row of each process, then the second ones: what fails later may follow from it."""
    counts, ranked = Counter[int](), list[tuple[int, Mapping[str, Any]]]()
    for row in rows:
        process = row.get("process", 0)
        ranked.append((counts[process], row))
        counts[process] += 1
    return [row for _, row in sorted(ranked, key=itemgetter(0))]


def _figures(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Each with its device."""
    for name, result in found.items():
        for row in result["rows"]:
            if row["kind"] == "figure":
                value = "no figure" if row["value"] is None else f"{row['value']:g} {row['unit']}"
                yield f"  {name}: {row['name']}: {value} (device {row['device']})"
