"""`caravan run`: an answer, or a conversation, in the terminal."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from model_zoo.store.store import Store, default_root
from runtime.errors import RequestError
from serve_app.cli.chat_session import ChatSession, parse_option, parse_think
from serve_app.cli.completion import served_models
from serve_app.cli.prompt import chat, pictures_in
from serve_app.cli.server import NoAnswer, NotFound, Server, ServerError, server_options
from serve_app.cli.terminal import print_note

_LARGEST_INPUT = 8 * 2**20  # characters of standard input
_SHOWN_MODELS = 10


@click.command(
    epilog="""\b
Examples:
  caravan run demo
  caravan run demo "What is 17 + 25?"
  caravan run demo "What do you see?" --image models/demo.png
  cat notes.txt | caravan run demo "Summarise this."
  caravan run demo "Add 3 and 4." --format schema.json --set temperature=0
  caravan run models/demo.gguf "Hi"  # starts a server if none runs
"""
)
@server_options
@click.argument("model", shell_complete=served_models)
@click.argument("prompt", nargs=-1)
@click.option("--system", metavar="TEXT", help="System prompt.")
@click.option(
    "--image",
    "images",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="A picture for the prompt; may be repeated.",
)
@click.option(
    "--format", "form", metavar="json|FILE", help="Answer in JSON, or by the JSON schema in a file."
)
@click.option("--think", metavar="on|off|LEVEL", help="Thinking of models that can.")
@click.option("--hide-thinking", is_flag=True, help="Think, but do not show it.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="An option of the model, such as temperature=0; may be repeated.",
)
@click.option("--keep-alive", metavar="TIME", help="How long the model stays loaded, such as 10m.")
@click.option("--verbose", is_flag=True, help="Show numbers of tokens and speed.")
def run(server: Server, model: str, prompt: tuple[str, ...], **given: Any) -> None:  # fmt: skip
    """Ask MODEL, or without PROMPT talk with it. Standard input follows the prompt. Paths of
    pictures in PROMPT add these.

    If no server answers, and neither --host nor $CARAVAN_HOST names one, a model of the store or a
    file is served as long as the conversation lasts.
    """
    text, pictures = pictures_in(" ".join(prompt))
    pictures += given["images"]
    if not sys.stdin.isatty():
        piped = _piped_text()
        text = f"{text}\n\n{piped}" if text and piped.strip() else text or piped
    session = ChatSession(
        server,
        model,
        system=given["system"],
        form=read_format(given["form"]),
        think=None if given["think"] is None else parse_think(given["think"]),
        hides_thinking=given["hide_thinking"],
        options=dict(map(named_value, given["settings"])),
        keep_alive=given["keep_alive"],
        verbose=given["verbose"],
    )
    with _served(server, model) as session.model, _explained(server):
        if text or pictures:
            session.ask(text, pictures)
        else:
            chat(session)


def _piped_text() -> str:
    sys.stdin.reconfigure(errors="strict")  # type: ignore[union-attr]  # as not in all locales
    try:
        return sys.stdin.read(_LARGEST_INPUT)
    except UnicodeDecodeError:
        raise RequestError(
            f"standard input is not text in {sys.stdin.encoding.upper()}; --image names a file "
            "with a picture"
        ) from None


@contextmanager
def _served(server: Server, model: str) -> Iterator[str]:
    """The model's name in requests, while the server answers."""
    chosen = click.get_current_context().get_parameter_source("server")
    if chosen is not ParameterSource.DEFAULT or _answers(server):
        yield model
        return
    # What starts a server takes long to import.
    from serve_app.cli.serve import served_name
    from serve_app.cli.temporary_server import is_on_this_machine, temporary_server

    if is_on_this_machine(model, Store(default_root(os.environ))):
        print_note(
            f"no server answers at {server.host}; this one ends with the conversation, "
            f"`caravan serve {model}` keeps one"
        )
        with temporary_server(model):
            yield served_name(model)
    else:
        yield model


def _answers(server: Server) -> bool:
    try:
        server.get("/healthz")
    except NoAnswer:
        return False
    except ServerError:
        pass
    return True


@contextmanager
def _explained(server: Server) -> Iterator[None]:
    """Adds the names of the models that there are to the error about one that is not."""
    try:
        yield
    except NotFound as error:
        names = [
            model["name"].removesuffix(":latest") for model in server.get("/api/tags")["models"]
        ]
        shown = ", ".join(names[:_SHOWN_MODELS]) or "none"
        raise ServerError(f"{error}; the server has {shown}") from None


def named_value(text: str) -> tuple[str, Any]:
    """`NAME=VALUE`."""
    name, separator, value = text.partition("=")
    if not (separator and name.strip()):
        raise click.UsageError(f"{text!r} is not NAME=VALUE.")
    try:
        return parse_option(name.strip(), value)
    except RequestError as error:
        raise click.UsageError(str(error)) from None


def read_format(text: str | None) -> Any:
    """None, "json", or the schema in a file."""
    if text is None or text == "json":
        return text
    try:
        return json.loads(Path(text).read_text())
    except ValueError as error:
        raise click.UsageError(f"{text} is not JSON: {error}.") from None
