"""`caravan ps` and `caravan stop`: the models that a server has loaded."""

from datetime import datetime
from typing import Any

import click

from serve_app.cli.completion import loaded_models
from serve_app.cli.server import Server, server_options
from serve_app.cli.shared_options import json_option
from serve_app.cli.terminal import byte_size, local_date, print_error, print_json, print_table

_COLUMNS = ("name", "id", "size>", "quantisation", "context>", "until")
_SHOWN_DIGITS = 12
# Dates beyond this year mean that a model stays loaded.
_FOREVER = "2300"


@click.command(
    epilog="""\b
Examples:
  caravan ps
  caravan ps --host gpu-1:8000 --json
"""
)
@server_options
@json_option
def ps(server: Server, as_json: bool) -> None:
    """List the models that a server has loaded."""
    models = server.get("/api/ps")["models"]
    if as_json:
        print_json(models)
        return
    print_table(
        _COLUMNS,
        (
            (
                model["name"],
                model["digest"][:_SHOWN_DIGITS],
                byte_size(model["size"]),
                model["details"]["quantization_level"],
                f"{model['context_length']:,}",
                "stays" if _stays(model) else _local(model["expires_at"]),
            )
            for model in models
        ),
    )


@click.command(
    epilog="""\b
Example:
  caravan stop llama3.2:1b
"""
)
@server_options
@click.argument("model", shell_complete=loaded_models)
def stop(server: Server, model: str) -> None:
    """Unload a model that the server loads on demand.

    Models of its configuration stay loaded. Ctrl-C in the terminal of `caravan serve` ends the
    server.
    """
    server.post("/api/generate", {"model": model, "keep_alive": 0, "stream": False})
    if any(_is(each["name"], model) and _stays(each) for each in server.get("/api/ps")["models"]):
        print_error(f"{model} stays loaded, because the server's configuration has it")


def _local(date: str) -> str:
    return local_date(datetime.fromisoformat(date).timestamp())


def _is(name: str, given: str) -> bool:
    return name.lower() == (given if ":" in given else f"{given}:latest").lower()


def _stays(model: dict[str, Any]) -> bool:
    return model["expires_at"] > _FOREVER
