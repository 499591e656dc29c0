"""A server for one conversation, where none runs."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import IO

import click

from model_zoo.sources.reference import is_path
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from runtime.errors import SourceError
from serve_app.child_process import end_with_parent
from serve_app.cli.serve_output import READY, READY_WITHOUT_MODELS

# -P: modules of the working directory, which may be a downloaded repository, are not imported.
COMMAND = (sys.executable, "-P", "-m", "serve_app.cli", "serve")


def is_on_this_machine(text: str, store: Store) -> bool:
    """Whether this is a file, a source, or the name of a model in the store."""
    if is_path(text) or "://" in text:
        return True
    try:
        return store.find(ModelName.parse(text)) is not None
    except SourceError:
        return False


@contextmanager
def temporary_server(model: str, *, command: Sequence[str] = COMMAND) -> Iterator[None]:
    """A `caravan serve` of the model that answers; its output is shown. Raises click's Exit if it
    cannot be started, which it has explained."""
    process = subprocess.Popen(
        [*command, model],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,  # Ctrl-C ends an answer, not the server
        preexec_fn=end_with_parent,
    )
    assert process.stderr is not None
    try:
        _await_ready(process.stderr)
        Thread(target=_show, args=[process.stderr], daemon=True).start()
        yield
    finally:
        process.terminate()
        process.wait()


def _await_ready(output: IO[str]) -> None:
    for line in output:
        if line.startswith(READY) and not line.startswith(READY_WITHOUT_MODELS):
            return
        click.secho(line, err=True, nl=False, dim=True)
        if line.startswith(READY):
            break
    raise click.exceptions.Exit(1)


def _show(output: IO[str]) -> None:
    """Warnings of a server that runs."""
    for line in output:
        click.secho(line, err=True, nl=False, dim=True)
