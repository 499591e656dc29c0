"""`caravan cp`: a model under a second name."""

import click

from model_zoo.store import creation
from model_zoo.store.store import Store
from serve_app.cli.completion import stored_models
from serve_app.cli.remove import stored_name
from serve_app.cli.shared_options import json_option, store_option
from serve_app.cli.terminal import harmless, print_json


@click.command(
    "cp",
    epilog="""\b
Example:
  caravan cp llama3.2:1b mine
""",
)
@click.argument("source", metavar="NAME", shell_complete=stored_models)
@click.argument("destination", metavar="NEW")
@store_option
@json_option
def copy(source: str, destination: str, store: Store, as_json: bool) -> None:
    """Give a model of the store a second name, without copying its files.

    If NEW is already the name of a model, it is reassigned.
    """
    name, new = stored_name(source), stored_name(destination)
    creation.copy(name, new, store)
    if as_json:
        print_json({"copied": str(name), "to": str(new)}, line=True)
    else:
        click.echo(harmless(f"{name}: copied to {new}"))
