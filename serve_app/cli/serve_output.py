"""What `caravan serve` shows of the output of Ray Serve."""

import re
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from serve_app.cli.log_lines import parse_line, split_source, structured
from serve_app.cli.terminal import harmless, shortened

# How the line begins with which a start ends; the second where no model is served yet.
READY = "Caravan serves "
READY_WITHOUT_MODELS = f"{READY}none of the models yet"
_KEPT_LINES = 400
_LONGEST_LINE = 400
_TROUBLE = re.compile(r"(?:ERROR|Error|Exception|CRITICAL|FATAL|ALERT)\b")
_SHOWN_TROUBLE = 5
# An ingress behind HAProxy listens itself; without it, Serve's own proxy gets its routes.
_SERVED = re.compile(r"Started HTTP server|Got updated endpoints: .*route_patterns=\[")
# Serve's controller, before a stack trace or the message of an error.
_FAILED_APPLICATION = re.compile(
    r"(?:Deploying app|Runtime env setup for app|"
    r"Unexpected error occurred while deploying application) '([^']*)'"
)


@dataclass(slots=True)
class _Failure:
    """An application that could not be built. `reason`: the last line of its stack trace so far;
    `complete`: other lines of its source follow."""

    name: str
    source: str
    reason: str = "it could not be built"
    complete: bool = False


class StartReport:
    """Shows the progress of a start, then warnings and errors. `models`: those that start at once;
    without any, models are loaded when they are requested. `verbose`: also shows all output as it
    is, without bars. `log`: the file with all output; None if it cannot be written.

    Use as a context manager; `read` gets each line of output. `failed`: the server cannot start,
    but Serve keeps it running.
    """

    def __init__(
        self, *, address: str, models: frozenset[str], log: Path | None, verbose: bool = False
    ) -> None:
        self._address = address
        self._verbose = verbose
        self._draws_bars = sys.stderr.isatty() and not verbose
        self._models = models
        self._waiting = set(models)
        self._served_models = set(models)
        self._on_demand = not models
        self.log = log
        self._begun = time.monotonic()
        self._ready = False
        self._kept: list[str] = []
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._said: set[str] = set()
        self._served = False
        self._failure: _Failure | None = None
        self.is_stopping = False

    def __enter__(self) -> Self:
        place = "" if self.log is None else f", whose output is in {self.log}"
        self._say(f"starting Ray Serve{place}")
        if self._draws_bars:
            self._bars.add_task("starting", total=None)
            self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop_bars()

    def read(self, line: str) -> None:
        """One line of output."""
        if self._verbose:
            with suppress(OSError):  # as in `_say`
                click.echo(line.rstrip("\n"), err=True)
        source, text = split_source(line)
        event = structured(text)
        if event is not None:
            self._event(event)
        else:
            self._plain(source, text, line)

    @property
    def failed(self) -> bool:
        return self._failure is not None and not self._ready

    def stopping(self) -> None:
        """The user has interrupted the server."""
        if not self.is_stopping:
            self._say("stopping")
        self.is_stopping = True

    def ended(self, status: int) -> None:
        """The server has ended with this exit status, unasked."""
        if self._failure is None or self._ready:
            how = f"ended with status {status}"
            reasons = [line for line in self._kept if _TROUBLE.search(line)][-_SHOWN_TROUBLE:]
        else:  # it was then stopped
            how = "could not start"
            reasons = [f"application {self._failure.name}: {self._failure.reason}"]
        self._say(f"The server {how}. All of its output: {self.log or '`--verbose` shows it'}")
        for reason in reasons:
            self._say(shortened(reason, _LONGEST_LINE), problem=True)

    def warn(self, text: str) -> None:
        self._say(text, problem=True)

    def _plain(self, source: str, text: str, line: str) -> None:
        """A line of Ray's."""
        self._kept = [*self._kept, f"({source}) {text}" if source else text][-_KEPT_LINES:]
        if failed := _FAILED_APPLICATION.search(text):
            self._failure = _Failure(failed[1], source)
            if self._ready:
                self._say(f"application {failed[1]} was not replaced: see the log", problem=True)
        elif self._failure is not None and source == self._failure.source:
            self._failure.complete |= parse_line(line).level is not None
            if text.strip() and not self._failure.complete:
                self._failure.reason = text.strip()
        elif "Importing and building app" in text:
            self._say("reading the configuration")
        elif _SERVED.search(text):
            self._served = True
            self._check_ready()

    def _event(self, event: dict[str, Any]) -> None:
        model = str(event.get("model", ""))
        match event.get("event"):
            case "starting":
                self._say(f"{model}: starting")
            case "device":
                kernels = f", kernels {event['kernels']}" if event.get("kernels") else ""
                self._say_once(f"device {event.get('name') or event.get('kind')}{kernels}")
            case "compiling kernels":
                self._say("compiling the CPU kernels, once: up to a minute")
            case "pull":
                self._progress(f"{model}: pulling", float(event.get("percent", 0)), "pulled")
            case "loading":
                self._progress(f"{model}: loading", float(event.get("percent", 0)), "loaded")
            case "ready":
                self._progress(f"{model}: loading", 100, "loaded")
                self._note(model, served=True)
            case "not served":
                what = model or str(event.get("what", ""))
                reason = str(event.get("reason", "")).removeprefix(f"Model {what}: ")
                self._say(f"{what}: {reason}", problem=True)
                self._note(model, served=False)
            case "not schedulable":
                self._say(str(event.get("reason", "")), problem=True)
                self._note(model, served=False)
            case name if event.get("level") in ("warning", "error"):
                hidden = ("event", "level", "timestamp", "traceback")
                facts = ", ".join(f"{k}: {v}" for k, v in event.items() if k not in hidden)
                self._say(f"{name}: {facts}", problem=True)

    def _note(self, model: str, *, served: bool) -> None:
        """The model has started or will not soon, so the start does not wait for it any more."""
        self._waiting.discard(model)
        self._served_models.discard(model)
        if served and model in self._models:
            self._served_models.add(model)
        self._check_ready()

    def _progress(self, work: str, percent: float, done: str) -> None:
        """A bar for `work`, or without a terminal one line when it is done."""
        if not self._draws_bars:
            if percent >= 100 and work not in self._tasks:
                self._tasks[work] = TaskID(0)
                self._say(f"{work.rpartition(' ')[0]} {done}")
            return
        if work not in self._tasks:
            self._tasks[work] = self._bars.add_task(harmless(work), total=100)
        self._bars.update(self._tasks[work], completed=percent)

    def _check_ready(self) -> None:
        if self._ready or not self._served or self._waiting:
            return
        self._ready = True
        self._stop_bars()
        seconds = time.monotonic() - self._begun
        names = ", ".join(sorted(self._served_models)) or "models on demand" * self._on_demand
        self._say(
            f"{READY + names if names else READY_WITHOUT_MODELS} at {self._address} after "
            f"{seconds:.0f} s: chat page /, status /status, APIs /docs. Ctrl-C stops it."
        )

    def _stop_bars(self) -> None:
        if self._bars.live.is_started:
            self._bars.stop()

    def _say_once(self, text: str) -> None:
        """What each load of a model repeats."""
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _say(self, text: str, *, problem: bool = False) -> None:
        """Standard error that cannot be written, such as a file on a full disk, does not end the
        server."""
        line = harmless(text)
        with suppress(OSError):
            if self._bars.live.is_started:
                style = "red" if problem else None
                self._bars.console.print(
                    line, style=style, markup=False, highlight=False, soft_wrap=True
                )
            else:
                click.secho(line, err=True, fg="red" if problem else None)
