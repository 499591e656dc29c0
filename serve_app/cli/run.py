"""`caravan run`: an answer, or a conversation, in the terminal."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from serve_app.cli.chat_session import ChatSession, parse_option, parse_think
from serve_app.cli.completion import served_models
from serve_app.cli.prompt import chat
from serve_app.cli.server import Server, server_options

_LARGEST_INPUT = 8 * 2**20  # bytes of standard input


@click.command(
    epilog="""\b
Examples:
  caravan run demo
  caravan run demo "What is 17 + 25?"
  caravan run demo "What do you see?" --image models/demo.png
  cat notes.txt | caravan run demo "Summarise this."
  caravan run demo "Add 3 and 4." --format schema.json --set temperature=0
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
    "--format", "form", metavar="json|FILE", help="Answer in JSON, or in the form of a JSON schema."
)
@click.option("--think", metavar="on|off|LEVEL", help="Thinking, for models that support it.")
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
    """Ask MODEL, or chat with it if there is no PROMPT. Standard input is appended to the
    prompt."""
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
    text = " ".join(prompt)
    if not sys.stdin.isatty():
        piped = sys.stdin.read(_LARGEST_INPUT)
        text = f"{text}\n\n{piped}" if text and piped.strip() else text or piped
    if text or given["images"]:
        session.ask(text, given["images"])
    else:
        chat(session)


def named_value(text: str) -> tuple[str, Any]:
    """`NAME=VALUE`."""
    name, separator, value = text.partition("=")
    if not (separator and name.strip()):
        raise click.UsageError(f"{text!r} is not NAME=VALUE.")
    return parse_option(name.strip(), value)


def read_format(text: str | None) -> Any:
    """None, "json", or the schema in a file."""
    if text is None or text == "json":
        return text
    try:
        return json.loads(Path(text).read_text())
    except ValueError as error:
        raise click.UsageError(f"{text} is not JSON: {error}.") from None
