"""`caravan key`: API keys for a server."""

import re

import click

from serve_app.api.keys import NAME_PATTERN, key_hash, new_key
from serve_app.cli.options import json_option
from serve_app.cli.terminal import print_json


@click.group("key")
def key() -> None:
    """Make API keys for the file that `api_keys_file` names."""


@key.command("new")
@click.argument("name")
@json_option
def new(name: str, as_json: bool) -> None:
    """Make a key, print it once, and print its entry for the file of keys.

    The entry goes to standard output and has only the key's hash, the key itself goes to standard
    error: `caravan key new alice >> keys.yaml`. Limits can be added to the entry.
    """
    if not re.fullmatch(NAME_PATTERN, name):
        raise click.BadParameter(
            "letters, digits and ._@- are allowed, at most 64", param_hint="NAME"
        )
    made = new_key()
    entry = {"name": name, "sha256": key_hash(made)}
    if as_json:
        print_json({"key": made, "entry": entry})
        return
    # Quoted: YAML takes some names and hashes for numbers.
    click.echo('- name: "{name}"\n  sha256: "{sha256}"'.format(**entry))
    click.echo(f"Key of {name}, which is not shown again: {made}", err=True)
