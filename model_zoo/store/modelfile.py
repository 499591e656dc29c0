"""Parses and renders Modelfiles, Ollama's definitions of models."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from model_zoo.chat.messages import Message
from runtime.errors import RequestError

MAX_CHARACTERS = 8 << 20
MAX_COMMANDS = 10_000
COMMANDS = ("from", "adapter", "parameter", "system", "template", "message", "license")
ROLES = ("system", "user", "assistant")
_REFUSED: Mapping[str, str] = {
    "renderer": "use a TEMPLATE in Jinja instead",
    "parser": "leave it out",
    "requires": "leave it out",
    "draft": "leave it out",
}
_WITH_KEY = {"parameter": "a name", "message": "a role"}
_QUOTES, _QUOTE = '"""', '"'


@dataclass(frozen=True, slots=True)
class Command:
    """A command. `line`: the number of its first line; `key`: the parameter's name or the message's
    role."""

    line: int
    name: str
    value: str
    key: str | None = None

    def refuse(self, reason: str) -> RequestError:
        return RequestError(f"Modelfile, line {self.line}: {reason}")


def parse_modelfile(text: str) -> list[Command]:
    """The commands in order, with names in lower case; values are not validated.

    RequestError names the line and the mistake.
    """
    if len(text) > MAX_CHARACTERS:
        raise RequestError(
            f"The Modelfile has {len(text):,} characters; the limit is {MAX_CHARACTERS:,}."
        )
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    commands = list(islice(_commands(lines), MAX_COMMANDS + 1))
    if len(commands) > MAX_COMMANDS:
        raise RequestError(f"The Modelfile has more than {MAX_COMMANDS:,} commands, the limit.")
    if not any(command.name == "from" for command in commands):
        raise RequestError("The Modelfile has no FROM line, which names the base of the model.")
    return commands


def render_modelfile(
    base: str,
    *,
    adapters: Iterable[str] = (),
    template: str | None = None,
    system: str | None = None,
    parameters: Iterable[tuple[str, object]] = (),
    messages: Sequence[Message] = (),
    license: str | None = None,
) -> str:
    """Renders a Modelfile. Three quotes in a row, which a Modelfile cannot express, are removed."""
    lines = [f"FROM {base}", *(f"ADAPTER {adapter}" for adapter in adapters)]
    lines += [f"TEMPLATE {_quoted(template)}"] if template else []
    lines += [f"SYSTEM {_quoted(system)}"] if system else []
    for name, value in parameters:
        lines.append(f"PARAMETER {name} {_spelled(value)}")
    lines += [f"MESSAGE {each.role} {_quoted(each.text)}" for each in messages]
    lines += [f"LICENSE {_quoted(license)}"] if license else []
    return "\n".join(lines)


def _commands(lines: Sequence[str]) -> Iterator[Command]:
    at = 0
    while at < len(lines):
        stated = lines[at].lstrip()
        if not stated or stated.startswith("#"):
            at += 1
            continue
        number = at + 1
        name, rest = _command_name(number, stated)
        key, rest = _keyed(number, name, rest)
        value, at = _value(lines, at, rest)
        yield _checked(Command(number, name, value, key))


def _command_name(number: int, stated: str) -> tuple[str, str]:
    word, rest = [*stated.split(None, 1), ""][:2]
    name = word.lower()
    if name in _REFUSED:
        raise RequestError(
            f"Modelfile, line {number}: {name.upper()} is not served; {_REFUSED[name]}."
        )
    if name not in COMMANDS:
        wanted = ", ".join(command.upper() for command in COMMANDS)
        raise RequestError(
            f"Modelfile, line {number}: {word[:40]!r} is not a command; use one of {wanted}."
        )
    return name, rest


def _keyed(number: int, name: str, rest: str) -> tuple[str | None, str]:
    if name not in _WITH_KEY:
        return None, rest
    key, rest = [*rest.split(None, 1), "", ""][:2]
    if not key or key.startswith(_QUOTE):
        raise RequestError(
            f"Modelfile, line {number}: {name.upper()} must be followed by {_WITH_KEY[name]}."
        )
    return key.lower(), rest


def _value(lines: Sequence[str], at: int, begun: str) -> tuple[str, int]:
    """The value and the index of the next line.

    As in Ollama, a quoted value ends at a line that ends with quotes, and has no escapes.
    """
    opening = next((quote for quote in (_QUOTES, _QUOTE) if begun.startswith(quote)), "")
    if not opening:
        return begun.strip(), at + 1
    parts = [begun]
    for after in range(at + 1, len(lines) + 1):
        last = parts[-1].rstrip()
        if last.endswith(opening) and (len(parts) > 1 or len(last) >= 2 * len(opening)):
            parts[-1] = last
            return "\n".join(parts)[len(opening) : -len(opening)], after
        parts += lines[after : after + 1]
    raise RequestError(f"Modelfile, line {at + 1}: the quoted text has no closing {opening}")


def _checked(command: Command) -> Command:
    if command.name in ("from", "adapter", "parameter") and not command.value:
        raise command.refuse(f"{command.name.upper()} has no value.")
    if command.name == "message" and command.key not in ROLES:
        raise command.refuse(f"the role of a message must be one of {', '.join(ROLES)}.")
    return command


def _spelled(value: object) -> str:
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _quoted(text: str) -> str:
    plain = text.replace(_QUOTES, "")
    wants = "\n" in plain or _QUOTE in plain
    return f"{_QUOTES}{plain}{_QUOTES}" if wants else f"{_QUOTE}{plain}{_QUOTE}"
