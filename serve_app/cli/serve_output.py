"""The part of Ray Serve's output that `caravan serve` shows."""

import re
import sys
import time
from pathlib import Path
from typing import Any, Self

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from serve_app.cli.log_lines import split_source, structured
from serve_app.cli.terminal import harmless, shortened

_KEPT_LINES = 400
_LONGEST_LINE = 400
_TROUBLE = re.compile(r"(?:ERROR|Error|Exception|CRITICAL|FATAL)\b")
_SHOWN_TROUBLE = 5


class StartReport:
    """Shows the progress of a start, then warnings and errors. `models`: those that start with the
    server.

    Use as a context manager; `read` gets each line of output.
    """

    def __init__(self, *, address: str, models: frozenset[str], log: Path) -> None:
        self._address = address
        self._waiting = set(models)
        self._served_models = set(models)
        self._log = log
        self._begun = time.monotonic()
        self._ready = False
        self._kept: list[str] = []
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            console=Console(stderr=True),
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._served = False
        self.is_stopping = False

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._bars.start()
        self._print("starting Ray Serve")
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop_bars()

    def read(self, line: str) -> None:
        """One line of output."""
        source, text = split_source(line)
        event = structured(text)
        if event is not None:
            self._event(event)
        else:
            self._kept = [*self._kept, f"({source}) {text}" if source else text][-_KEPT_LINES:]
            if "Importing and building app" in text:
                self._print("reading the configuration")
            elif "Started HTTP server" in text:
                self._served = True
                self._check_ready()

    def stopping(self) -> None:
        """The user has interrupted the server."""
        if not self.is_stopping:
            self._print("stopping")
        self.is_stopping = True

    def ended(self, status: int) -> None:
        """The server has ended with this exit status without being interrupted."""
        trouble = [line for line in self._kept if _TROUBLE.search(line)]
        for line in trouble[-_SHOWN_TROUBLE:]:
            self._print(shortened(line, _LONGEST_LINE))
        self._print(f"The server ended with status {status}. All of its output: {self._log}")

    def _event(self, event: dict[str, Any]) -> None:
        model = str(event.get("model", ""))
        match event.get("event"):
            case "starting":
                self._print(f"{model}: starting")
            case "device":
                kernels = f", kernels {event['kernels']}" if event.get("kernels") else ""
                self._print(f"device {event.get('name') or event.get('kind')}{kernels}")
            case "loading":
                self._loading(model, float(event.get("percent", 0)))
            case "ready":
                self._loading(model, 100)
                self._waiting.discard(model)
                self._check_ready()
            case "not served":
                self._waiting.discard(model)
                self._served_models.discard(model)
                what = model or str(event.get("what", ""))
                self._print(f"{what}: {event.get('reason', '')}", problem=True)
                self._check_ready()
            case name if event.get("level") in ("warning", "error"):
                hidden = ("event", "level", "timestamp", "traceback")
                facts = ", ".join(f"{k}: {v}" for k, v in event.items() if k not in hidden)
                self._print(f"{name}: {facts}", problem=True)

    def _loading(self, model: str, percent: float) -> None:
        if not sys.stderr.isatty():
            if percent >= 100 and model not in self._tasks:
                self._tasks[model] = TaskID(0)
                self._print(f"{model}: loaded")
            return
        if model not in self._tasks:
            self._tasks[model] = self._bars.add_task(harmless(f"{model}: loading"), total=100)
        self._bars.update(self._tasks[model], completed=percent)

    def _check_ready(self) -> None:
        if self._ready or not self._served or self._waiting:
            return
        self._ready = True
        self._stop_bars()
        seconds = time.monotonic() - self._begun
        names = ", ".join(sorted(self._served_models)) or "none of the models yet"
        self._print(
            f"Caravan serves {names} at {self._address} after {seconds:.0f} s: chat page /, "
            f"status /status, APIs /docs. Log: {self._log}. Ctrl-C stops it."
        )

    def _stop_bars(self) -> None:
        if self._bars.live.is_started:
            self._bars.stop()

    def _print(self, text: str, *, problem: bool = False) -> None:
        line = harmless(text)
        if self._bars.live.is_started:
            self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            click.secho(line, err=True, fg="red" if problem else None)
