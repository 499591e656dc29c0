"""`caravan list`: the models in the store."""

import hashlib
from collections.abc import Mapping
from typing import Any

import click

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.model_headers import ModelHeaders
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from runtime.errors import CaravanError
from serve_app.cli.shared_options import json_option, store_option, without_models
from serve_app.cli.terminal import (
    byte_size,
    harmless,
    iso_date,
    local_date,
    print_json,
    print_table,
)

_COLUMNS = ("name", "id", "size>", "architecture", "quantisation", "modified")
_SHOWN_DIGITS = 12


@click.command(
    "list",
    epilog="""\b
Examples:
  caravan list
  caravan list --json
""",
)
@store_option
@json_option
def list_(store: Store, as_json: bool) -> None:
    """List the models of the store, the newest first."""
    rows = [_row(store, name) for name in store.names()]
    rows.sort(key=lambda row: row["modified_at"] or 0.0, reverse=True)
    if as_json:
        print_json([row | {"modified_at": _date(row["modified_at"])} for row in rows])
        return
    if not rows:
        click.echo(f"{without_models(store)}; use `caravan pull`.", err=True)
    print_table(_COLUMNS, map(_cells, rows))
    for row in rows:
        if row["error"] is not None:
            click.echo(harmless(f"{row['name']}: {row['error']}"), err=True)


def _row(store: Store, name: ModelName) -> dict[str, Any]:
    """The facts of a model; for a damaged one the known facts and the error."""
    row: dict[str, Any] = {
        "name": str(name),
        "digest": None,
        "bytes": 0,
        "modified_at": None,
        "architecture": None,
        "quantization": None,
        "files": [],
        "blobs": [],
        "error": None,
    }
    try:
        manifest = store.manifest(name)
        row["digest"] = f"sha256:{hashlib.sha256(manifest.raw).hexdigest()}"
        row["bytes"] = manifest.size_bytes
        row["blobs"] = [layer.digest for layer in manifest.blobs]
        model = store.open(name)
        row["modified_at"] = model.modified_at
        row["files"] = [str(path) for path in model.files]
        file = ModelHeaders.open(model.files[0])
        metadata = Metadata(file.metadata, path=file.path)
        row["architecture"] = metadata.architecture
        row["quantization"] = file.quantization(metadata)
    except CaravanError as error:
        row["error"] = str(error)
    return row


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    digest = row["digest"] or "sha256:"
    modified_at = row["modified_at"]
    return (
        row["name"],
        digest.removeprefix("sha256:")[:_SHOWN_DIGITS],
        byte_size(row["bytes"]),
        row["architecture"] or "?",
        row["quantization"] or "?",
        "damaged" if modified_at is None else local_date(modified_at),
    )


def _date(unix_s: float | None) -> str | None:
    return None if unix_s is None else iso_date(unix_s)
