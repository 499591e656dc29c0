"""Options that several commands share."""

import os
from pathlib import Path
from typing import Any

import click

from model_zoo.store.store import Store, default_root
from runtime.home_directory import expanded

_AS_JSON = f"{__name__}.as_json"


def _store(context: click.Context, parameter: click.Parameter, folder: Path | None) -> Store:
    return Store(default_root(os.environ) if folder is None else expanded(folder))


def store_option(command: Any) -> Any:
    """`store`: the Store that the command works on."""
    return click.option(
        "--store",
        type=click.Path(path_type=Path),
        metavar="DIR",
        callback=_store,
        help="Folder of the store; default: $CARAVAN_MODELS, or else ~/.caravan/models.",
    )(command)


def without_models(store: Store) -> str:
    """The beginning of a note about a store that has no models."""
    return f"The store {store.root} {'is empty' if store.root.exists() else 'does not exist'}"


def json_option(command: Any) -> Any:
    """`as_json`: whether output and errors are JSON."""
    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        callback=_remember,
        help="Write output and errors as JSON.",
    )(command)


def wants_json(context: click.Context) -> bool:
    """Whether the command of this context, or of a nested one, has `--json`."""
    return bool(context.meta.get(_AS_JSON))


def _remember(context: click.Context, parameter: click.Parameter, as_json: bool) -> bool:
    context.meta[_AS_JSON] = as_json
    return as_json
