"""A conversation with a model of a server, printed as it is generated."""

import base64
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from runtime.errors import RequestError
from serve_app.cli.server import Server
from serve_app.cli.terminal import harmless, harmless_lines
from serve_app.config.model_parameters import PARAMETER_NAMES
from serve_app.config.options import Options

OPTION_NAMES = PARAMETER_NAMES | {each.name for each in fields(Options)}


@dataclass(eq=False)
class ChatSession:
    """The turns so far, and how the next one is requested.

    `form`: None, "json" or a JSON schema. `think`: None leaves it to the model. A turn that fails
    or is interrupted before its first word leaves no message behind.
    """

    server: Server
    model: str
    system: str | None = None
    form: Any = None
    think: bool | str | None = None
    hides_thinking: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    keep_alive: str | None = None
    verbose: bool = False
    messages: list[dict[str, Any]] = field(default_factory=list, init=False)

    def ask(self, text: str, images: Sequence[Path] = ()) -> None:
        """Print the answer. Raises ServerError, and OSError for images."""
        message: dict[str, Any] = {"role": "user", "content": text}
        if images:
            message["images"] = [base64.b64encode(image.read_bytes()).decode() for image in images]
        answer = {"role": "assistant", "content": ""}
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, *self.messages, message]
        body: dict[str, Any] = {"model": self.model, "messages": messages}
        settings = {"format": self.form, "think": self.think, "keep_alive": self.keep_alive}
        body |= {name: value for name, value in settings.items() if value is not None}
        body["options"] = self.options
        parts = self.server.stream("/api/chat", body)
        try:
            with closing(parts):
                self._print(parts, answer)
        finally:
            if answer["content"]:
                self.messages += [message, answer]

    def load(self) -> None:
        """Load the model. Raises ServerError, for example for unknown ones."""
        body = {"model": self.model, "messages": [], "stream": False}
        self.server.post("/api/chat", body)

    def _print(self, parts: Iterator[dict[str, Any]], answer: dict[str, Any]) -> None:
        thinking = False
        for part in parts:
            message = part.get("message", {})
            if (thought := message.get("thinking")) and not self.hides_thinking:
                if not thinking:
                    click.secho("Thinking…", err=True, dim=True)
                thinking = True
                click.secho(_shown(thought), err=True, nl=False, dim=True)
            if content := message.get("content"):
                if thinking:
                    click.secho("\n…done thinking.\n", err=True, dim=True)
                thinking = False
                answer["content"] += content
                click.echo(_shown(content), nl=False)
            for call in message.get("tool_calls") or ():
                click.echo(harmless(f"{call['function']['name']} {call['function']['arguments']}"))
            if part.get("done"):
                click.echo()
                if self.verbose:
                    _print_statistics(part)


def parse_think(text: str) -> bool | str:
    """on and off, or a level such as low."""
    return {"on": True, "true": True, "off": False, "false": False}.get(text, text)


def parse_option(name: str, value: str) -> tuple[str, Any]:
    """An option of the model; its value is JSON or else a text. A stop string is a text, unless it
    is a JSON string or list. RequestError if there is no option of this name, which a server would
    ignore."""
    if name not in OPTION_NAMES:
        near = get_close_matches(name, OPTION_NAMES, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise RequestError(f"{name} is not an option{hint}")
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = value
    if name == "stop" and not isinstance(parsed, list):
        return name, [parsed if isinstance(parsed, str) else value]
    return name, parsed


def _shown(text: str) -> str:
    """An answer is not trusted: it may not control the terminal. Pipes get it unchanged."""
    return "\n".join(harmless_lines(text)) if sys.stdout.isatty() else text


def _print_statistics(part: dict[str, Any]) -> None:
    for name, count, duration in (
        ("prompt", "prompt_eval_count", "prompt_eval_duration"),
        ("answer", "eval_count", "eval_duration"),
    ):
        tokens, seconds = part.get(count) or 0, (part.get(duration) or 0) / 1e9
        speed = f", {tokens / seconds:.1f} tokens/s" if seconds else ""
        click.echo(f"{name}: {tokens} tokens in {seconds:.2f} s{speed}", err=True)
    click.echo(f"total: {(part.get('total_duration') or 0) / 1e9:.2f} s", err=True)
