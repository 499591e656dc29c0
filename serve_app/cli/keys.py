"""`caravan key`: API keys for a server."""

import re

import click

from serve_app.api.keys import NAME_PATTERN, NAME_RULE, key_hash, new_key
from serve_app.cli.shared_options import json_option
from serve_app.cli.terminal import print_json


@click.group(
    "key",
    epilog="""\b
Example:
  caravan key new alice >> keys.yaml
""",
)
def key() -> None:
    """Create API keys for the file that `api_keys_file` names."""


@key.command(
    "new",
    epilog="""\b
Example:
  caravan key new alice >> keys.yaml
""",
)
@click.argument("name")
@json_option
def new(name: str, as_json: bool) -> None:
    """Create a key and print it with its entry for the file of keys.

    The entry, with the hash of the key, goes to standard output; the key, which is not stored, to
    standard error: `caravan key new alice >> keys.yaml`. Limits can be added to the entry.
    """
    if not re.fullmatch(NAME_PATTERN, name):
        raise click.BadParameter(f"use {NAME_RULE}", param_hint="NAME")
    made = new_key()
    entry = {"name": name, "sha256": key_hash(made)}
    if as_json:
        print_json({"key": made, "entry": entry})
        return
    # Quoted: YAML would parse some names and hashes as numbers.
    click.echo('- name: "{name}"\n  sha256: "{sha256}"'.format(**entry))
    click.echo(f"Key of {name}, which is not shown again: {made}", err=True)
