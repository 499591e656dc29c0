"""How far something is: bars on a terminal, plain lines elsewhere, or JSON, one object a line."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from model_zoo.sources.pull import PullProgress
from serve_app.cli.terminal import byte_size, harmless, print_json

LINE_EVERY_S = 5.0
JSON_EVERY_S = 0.1
MOST_BARS = 10
_WHOLE = "in all"


class Reporter(Protocol):
    """Hears of each step; a context, so that a bar leaves the terminal as it found it."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def __call__(self, step: PullProgress) -> None: ...


def reporter(*, as_json: bool) -> Reporter:
    """JSON goes to standard output; what people read to standard error."""
    if as_json:
        return Steps(write_json, every_s=JSON_EVERY_S)
    if sys.stderr.isatty():
        return Bars(Console(stderr=True))
    return Steps(write_line, every_s=LINE_EVERY_S)


def counted(report: Reporter, status: str) -> Callable[[int, int], None]:
    """For work that tells of one count of bytes, done and in all."""

    def tell(done: int, total: int) -> None:
        report(PullProgress(status, total=total, completed=done))

    return tell


class Bars:
    """A bar for each blob or other work, and from the second on, one above them for all."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._whole = self._bars.add_task(_WHOLE, total=None, visible=False)
        self._tasks: dict[str, TaskID] = {}
        self._totals: dict[str, tuple[int, int]] = {}
        self._status = ""

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def __call__(self, step: PullProgress) -> None:
        if step.total:
            key = step.digest or step.status
            self._update(key, step.status, step.total, step.completed)
            self._totals[key] = (step.total, step.completed)
            total, completed = map(sum, zip(*self._totals.values(), strict=True))
            several = len(self._totals) > 1
            self._bars.update(self._whole, total=total, completed=completed, visible=several)
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
        """No more bars than a small terminal has lines; those that are full go first."""
        shown = [task for task in self._bars.tasks if task.visible and task.id != self._whole]
        full = [task for task in shown if task.finished]
        for task in full[: max(0, len(shown) + 1 - MOST_BARS)]:
            self._bars.update(task.id, visible=False)


class Steps:
    """Passes on what is new, what is complete, and of the rest something now and then."""

    def __init__(self, write: Callable[[PullProgress], None], *, every_s: float) -> None:
        self._write = write
        self._every_s = every_s
        self._last: tuple[str, str | None] | None = None
        self._due = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def __call__(self, step: PullProgress) -> None:
        kind, now = (step.status, step.digest), time.monotonic()
        complete = bool(step.total) and step.completed == step.total
        if kind == self._last and now < self._due and not complete:
            return
        self._last, self._due = kind, now + self._every_s
        self._write(step)


def write_line(step: PullProgress) -> None:
    """For logs and pipes."""
    far = ""
    if step.total:
        far = f": {100 * step.completed // step.total}% of {byte_size(step.total)}"
    click.echo(harmless(step.status) + far, err=True)


def write_json(step: PullProgress) -> None:
    """As Ollama's own `/api/pull` writes it."""
    document: dict[str, object] = {"status": step.status}
    if step.digest is not None:
        document["digest"] = step.digest
    if step.digest is not None or step.total:
        document |= {"total": step.total, "completed": step.completed}
    print_json(document, line=True)
