"""`caravan logs`: the log of `caravan serve` on this machine."""

import json
import os
import sys
import time
from contextlib import ExitStack
from typing import Any

import click

from runtime.errors import ConfigurationError
from serve_app.cli.log_file import (
    last_lines,
    latest_log,
    log_folder,
    log_path,
    new_lines,
    previous_log,
)
from serve_app.cli.log_lines import LEVELS, LogFilter, LogLine
from serve_app.cli.terminal import harmless, harmless_lines, plain, print_note

_PAUSE_S = 0.2
_NO_REQUEST = (
    "no line is of this request; lines of every request need a server with CARAVAN_LOG_LEVEL=debug"
)
_COLOURS = {"warning": "yellow", "error": "red"}


@click.command(
    epilog="""\b
Examples:
  caravan logs
  caravan logs --follow --level warning
  caravan logs --model demo --lines 200
  caravan logs --request 3f2a9c --port 8000
"""
)
@click.option("-f", "--follow", is_flag=True, help="Show new lines until Ctrl-C.")
@click.option(
    "-n",
    "--lines",
    "count",
    type=click.IntRange(0, 10**6),
    default=50,
    show_default=True,
    help="Number of last lines to show.",
)
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    default=LEVELS[0],
    help="Only lines of this level and above; default: all.",
)
@click.option("--model", help="Only lines that name this model.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Of the server on this port; default: the one that wrote last.",
)
@click.option(
    "--request",
    metavar="ID",
    help="Only lines of the request with this x-request-id. Those of requests without problems "
    "need a server with CARAVAN_LOG_LEVEL=debug.",
)
def logs(follow: bool, count: int, port: int | None, **chosen_by: Any) -> None:
    """Show the log of `caravan serve` on this machine.

    It is in ~/.local/state/caravan/serve-PORT.log, or in $XDG_STATE_HOME.
    """
    path = latest_log(os.environ) if port is None else log_path(os.environ, port)
    chosen = LogFilter(**chosen_by)
    if path is None:
        raise ConfigurationError(
            f"{log_folder(os.environ)} has no logs; `caravan serve` writes them."
        )
    if not path.exists():
        raise ConfigurationError(f"{path} does not exist; `caravan serve` writes it.")
    with ExitStack() as opened:
        earlier = [each for each in (previous_log(path),) if each.exists()]
        files = [opened.enter_context(each.open("rb")) for each in (*earlier, path)]
        found = last_lines(files, chosen, count)
        for line in found:
            show(line)
        if not found and count and chosen_by["request"] is not None:
            print_note(_NO_REQUEST)
        if follow:
            for line in new_lines(path, files[-1], chosen, pause):
                show(line)


def pause() -> None:
    """Wait before the file is read again."""
    sys.stdout.flush()
    time.sleep(_PAUSE_S)


def show(line: LogLine) -> None:
    """Print a line with control characters escaped."""
    if line.level is None:
        click.echo(f"    {harmless(line.event)}")
        return
    facts = dict(line.facts)
    traceback = str(facts.pop("traceback", ""))
    words = [
        line.when,
        click.style(f"{line.level.upper():<7}", fg=_COLOURS.get(line.level)),
        *([click.style(harmless(line.source), fg="cyan")] if line.source else []),
        click.style(harmless(line.event), bold=bool(facts)),
        *(f"{click.style(harmless(name), dim=True)}={_shown(facts[name])}" for name in facts),
    ]
    click.echo(" ".join(filter(None, words)))
    for further in harmless_lines(traceback.rstrip()) if traceback else ():
        click.echo(f"    {further}")


def _shown(value: object) -> str:
    return harmless(
        value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)
    )
