"""Options and arguments that several commands have."""

import os
from pathlib import Path
from typing import Any

import click

from model_zoo.store import Store, default_root


def _store(context: click.Context, parameter: click.Parameter, folder: Path | None) -> Store:
    return Store(default_root(os.environ) if folder is None else folder.expanduser())


def store_option(command: Any) -> Any:
    """`store`: the Store that the command works on."""
    return click.option(
        "--store",
        type=click.Path(path_type=Path),
        metavar="DIR",
        callback=_store,
        help="Where models are kept; otherwise $CARAVAN_MODELS, or else ~/.caravan/models.",
    )(command)


def json_option(command: Any) -> Any:
    """`as_json`: for programs instead of people."""
    return click.option("--json", "as_json", is_flag=True, help="Write JSON.")(command)
