"""Modelfiles: the text from which Ollama's users make models, as a list of commands."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from model_zoo.chat.messages import Message
from runtime.errors import RequestError

MAX_CHARACTERS = 8 << 20
MAX_COMMANDS = 10_000
COMMANDS = ("from", "parameter", "system", "template", "message", "license")
ROLES = ("system", "user", "assistant")
_REFUSED: Mapping[str, str] = {
    "adapter": "take a model that has the adapter merged in",
    "renderer": "a TEMPLATE in Jinja says how a conversation is written",
    "parser": "leave it out",
    "requires": "leave it out",
    "draft": "leave it out",
}
_WITH_KEY = {"parameter": "a name", "message": "a role"}
_QUOTES, _QUOTE = '"""', '"'


@dataclass(frozen=True, slots=True)
class Command:
    """A command in the line where it begins; `key`: the parameter's name, or the message's role."""

    line: int
    name: str
    value: str
    key: str | None = None

    def refuse(self, reason: str) -> RequestError:
        return RequestError(f"Modelfile, line {self.line}: {reason}")


def parse_modelfile(text: str) -> list[Command]:
    """The commands in their order; names are in lower case.

    RequestError names the line and what is wrong with it. That values make sense is not checked.
    """
    if len(text) > MAX_CHARACTERS:
        raise RequestError(
            f"The Modelfile has {len(text):,} characters; at most {MAX_CHARACTERS:,} are read."
        )
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    commands = list(_commands(lines))
    if len(commands) > MAX_COMMANDS:
        raise RequestError(
            f"The Modelfile has {len(commands):,} commands; at most {MAX_COMMANDS:,} are read."
        )
    if not any(command.name == "from" for command in commands):
        raise RequestError("The Modelfile has no FROM line; it names what the model is made of.")
    return commands


def render_modelfile(
    base: str,
    *,
    template: str | None = None,
    system: str | None = None,
    parameters: Iterable[tuple[str, object]] = (),
    messages: Sequence[Message] = (),
    license: str | None = None,
) -> str:
    """A Modelfile that says this; what has no spelling in one, three quotes in a row, is cut."""
    lines = [f"FROM {base}"]
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
        name, rest = _known(number, stated)
        key, rest = _keyed(number, name, rest)
        value, at = _value(lines, at, rest)
        yield _checked(Command(number, name, value, key))


def _known(number: int, stated: str) -> tuple[str, str]:
    word, rest = [*stated.split(None, 1), ""][:2]
    name = word.lower()
    if name in _REFUSED:
        raise RequestError(
            f"Modelfile, line {number}: {name.upper()} is not served; {_REFUSED[name]}."
        )
    if name not in COMMANDS:
        wanted = ", ".join(command.upper() for command in COMMANDS)
        raise RequestError(
            f"Modelfile, line {number}: {word[:40]!r} is no command; there are {wanted}."
        )
    return name, rest


def _keyed(number: int, name: str, rest: str) -> tuple[str | None, str]:
    if name not in _WITH_KEY:
        return None, rest
    key, rest = [*rest.split(None, 1), "", ""][:2]
    if not key or key.startswith(_QUOTE):
        raise RequestError(
            f"Modelfile, line {number}: after {name.upper()} {_WITH_KEY[name]} is wanted."
        )
    return key.lower(), rest


def _value(lines: Sequence[str], at: int, begun: str) -> tuple[str, int]:
    """The value and the line after it; one in quotes goes on until a line that ends with them.

    As Ollama has it: nothing within quotes is an escape.
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
    raise RequestError(f"Modelfile, line {at + 1}: the text that begins there has no end {opening}")


def _checked(command: Command) -> Command:
    if command.name in ("from", "parameter") and not command.value:
        raise command.refuse(f"{command.name.upper()} is without a value.")
    if command.name == "message" and command.key not in ROLES:
        raise command.refuse(f"a message's role is one of {', '.join(ROLES)}.")
    return command


def _spelled(value: object) -> str:
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _quoted(text: str) -> str:
    plain = text.replace(_QUOTES, "")
    wants = "\n" in plain or _QUOTE in plain
    return f"{_QUOTES}{plain}{_QUOTES}" if wants else f"{_QUOTE}{plain}{_QUOTE}"
