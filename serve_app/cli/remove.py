"""`caravan rm`: removes models from the store."""

import click

from model_zoo.sources.reference import PathSource, parse_source
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from runtime.errors import CaravanError
from serve_app.cli.completion import stored_models
from serve_app.cli.shared_options import json_option, store_option
from serve_app.cli.terminal import byte_size, harmless, print_error, print_json


@click.command(
    "rm",
    epilog="""\b
Example:
  caravan rm llama3.2:1b mine
""",
)
@click.argument("names", metavar="NAME...", nargs=-1, required=True, shell_complete=stored_models)
@store_option
@json_option
def remove(names: tuple[str, ...], store: Store, as_json: bool) -> None:
    """Remove models and the files that no other model uses.

    Then, as after `caravan pull`, files are removed that no model has used for a day, such as those
    of older versions and interrupted pulls. Files that a process uses are kept until later.

    If one model cannot be removed, the others are still removed; the exit status is then 1.
    """
    failed = False
    for text in names:
        try:
            name = stored_name(text)
            removal = store.remove(name)
        except CaravanError as error:
            print_error(str(error), as_json=as_json)
            failed = True
            continue
        used = sum(layer.size for layer in removal.mapped)
        if as_json:
            stated = {"freed_bytes": removal.freed_bytes, "in_use_bytes": used}
            print_json({"removed": str(name), **stated}, line=True)
        else:
            rest = f"; {byte_size(used)} are in use and removed later" if used else ""
            freed = byte_size(removal.freed_bytes)
            click.echo(harmless(f"{name}: removed, {freed} freed{rest}"))
    remove_unused(store, as_json=as_json)
    if failed:
        raise click.exceptions.Exit(1)


def remove_unused(store: Store, *, as_json: bool) -> None:
    """Remove old files that no model uses, and print their bytes; an error is only printed."""
    try:
        freed = store.remove_unused()
    except CaravanError as error:
        print_error(f"Unused files are not removed: {error}")
        return
    if freed and as_json:
        print_json({"unused_freed_bytes": freed}, line=True)
    elif freed:
        click.echo(f"{byte_size(freed)} of files that no model uses freed")


def stored_name(text: str) -> ModelName:
    """The name in the store for a name or a source."""
    source = parse_source(text)
    return ModelName.parse(text) if isinstance(source, PathSource) else source.name
