"""Progress: bars on a terminal, plain lines elsewhere, or JSON with one object per line."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
import rich.progress
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from model_zoo.sources.pull import Progress, PullProgress, StepWriter
from serve_app.cli.terminal import byte_size, harmless, print_json

LINE_EVERY_S = 5.0
JSON_EVERY_S = 0.1
MAX_BARS = 10
_TOTAL = "total"


@contextmanager
def progress_reporter(*, as_json: bool) -> Iterator[Progress]:
    """A function that writes steps: JSON to standard output, or text to standard error."""
    if as_json:
        yield StepWriter(write_json, every_s=JSON_EVERY_S)
    elif sys.stderr.isatty():
        with bars_on(Console(stderr=True)) as bars:
            yield bars
    else:
        yield StepWriter(write_line, every_s=LINE_EVERY_S)


@contextmanager
def bars_on(console: Console) -> Iterator["ProgressBars"]:
    """Progress bars; the terminal is restored at the end."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=console) as bars:
        yield ProgressBars(bars)


def counted(report: Progress, status: str) -> Callable[[int, int], None]:
    """A callback for work that reports one count of bytes, done and total."""

    def completed(done: int, total: int) -> None:
        report(PullProgress(status, total=total, completed=done))

    return completed


class ProgressBars:
    """A bar for each blob or other item; if there are several, one more for the total."""

    def __init__(self, bars: rich.progress.Progress) -> None:
        self._bars = bars
        self._total = self._bars.add_task(_TOTAL, total=None, visible=False)
        self._tasks: dict[str, TaskID] = {}
        self._totals: dict[str, tuple[int, int]] = {}
        self._status = ""

    def __call__(self, step: PullProgress) -> None:
        if step.total:
            key = step.digest or step.status
            self._update(key, step.status, step.total, step.completed)
            self._totals[key] = (step.total, step.completed)
            total, completed = map(sum, zip(*self._totals.values(), strict=True))
            several = len(self._totals) > 1
            self._bars.update(self._total, total=total, completed=completed, visible=several)
        elif step.status != self._status:
            self._bars.console.print(Text(harmless(step.status)))
            self._status = step.status

    def _update(self, key: str, title: str, total: int, completed: int) -> None:
        title = harmless(title)
        if key not in self._tasks:
            self._hide_if_many()
            self._tasks[key] = self._bars.add_task(title, total=total)
        self._bars.update(self._tasks[key], description=title, total=total, completed=completed)

    def _hide_if_many(self) -> None:
        """Limits the bars to the lines of a small terminal by hiding complete ones."""
        shown = [task for task in self._bars.tasks if task.visible and task.id != self._total]
        complete = [task for task in shown if task.finished]
        for task in complete[: max(0, len(shown) + 1 - MAX_BARS)]:
            self._bars.update(task.id, visible=False)


def write_line(step: PullProgress) -> None:
    """Writes a step as a line for logs and pipes."""
    share = ""
    if step.total:
        share = f": {100 * step.completed // step.total}% of {byte_size(step.total)}"
    click.echo(harmless(step.status) + share, err=True)


def write_json(step: PullProgress) -> None:
    """Writes a step in the format of Ollama's `/api/pull`."""
    document: dict[str, object] = {"status": step.status}
    if step.digest is not None:
        document["digest"] = step.digest
    if step.digest is not None or step.total:
        document |= {"total": step.total, "completed": step.completed}
    print_json(document, line=True)
