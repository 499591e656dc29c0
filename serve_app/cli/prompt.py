"""The prompt of `caravan run`: messages, commands that begin with "/", and paths of pictures."""

import atexit
import os
import re
import readline
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from runtime.errors import CaravanError, ConfigurationError, RequestError
from runtime.home_directory import expanded
from serve_app.cli.chat_session import ChatSession, parse_option, parse_think
from serve_app.cli.terminal import harmless, print_error, print_note, print_pairs

FIRST, NEXT = ">>> ", "... "
_QUOTES = '"""'
_HISTORY_LINES = 1_000
# A path in the text, perhaps quoted or with escaped spaces, as terminals write dropped files.
_PICTURE = re.compile(
    r"""(?P<q>['"])(?P<quoted>[^'"\n]+\.(?:png|jpe?g|webp|gif|bmp))(?P=q)"""
    r"""|(?<!\S)(?P<plain>(?:\\.|[^\s\\'"])+\.(?:png|jpe?g|webp|gif|bmp))(?!\S)""",
    re.IGNORECASE,
)
HELP = (
    ("/set system TEXT", "use a system prompt; without TEXT none"),
    ("/set parameter NAME VALUE", "set an option such as temperature; without VALUE the default"),
    ("/set format json|off", "answer in JSON"),
    ("/set think on|off|LEVEL", "think before answering"),
    ("/set verbose on|off", "show numbers of tokens and speed"),
    ("/show", "show the model and the settings"),
    ("/clear", "forget the conversation"),
    ("/bye", "end; also Ctrl-D"),
    ('"""', "begins and ends a message of several lines"),
    ("path/of/a/picture.png", "in a message: adds the picture"),
)


def chat(session: ChatSession) -> None:
    """Read and answer messages until the end of the input. Raises ServerError if the model cannot
    be loaded; later errors are printed."""
    session.load()
    _keep_history()
    click.echo(harmless(f"{session.model}: /? shows the commands."), err=True)
    while (message := _read_message()) is not None:
        text = message.text
        if text.startswith("/") and not message.quoted and not _begins_with_picture(text):
            words = text[1:].split(None, 1)
            name = words[0] if words else "?"
            if name in ("bye", "exit", "quit"):
                return
            COMMANDS.get(name, _unknown)(session, words[1] if len(words) > 1 else "")
        elif text.strip():
            _ask(session, text)


@dataclass(frozen=True, slots=True)
class _Message:
    """What was typed, without its quotes; a message in quotes is no command."""

    text: str
    quoted: bool = False


def _read_message() -> _Message | None:
    """None at the end of the input. Ctrl-C discards a message."""
    while True:
        try:
            text = input(FIRST)
            if not text.lstrip().startswith(_QUOTES):
                return _Message(text)
            lines = [text.lstrip().removeprefix(_QUOTES)]
            while not lines[-1].rstrip().endswith(_QUOTES):
                lines.append(input(NEXT))
            return _Message("\n".join(lines).rstrip().removesuffix(_QUOTES), quoted=True)
        except KeyboardInterrupt:
            click.echo("\nUse Ctrl-D or /bye to leave.", err=True)
        except EOFError:
            click.echo()
            return None


def pictures_in(text: str) -> tuple[str, list[Path]]:
    """The text without the paths of existing pictures, and these paths. Prints which are taken."""
    found = []

    def taken(match: re.Match[str]) -> str:
        path = _path_in(match)
        if not path.is_file():
            print_note(f"{path}: there is no such picture; the message has its name only")
            return match[0]
        click.echo(harmless(f"(with {path})"), err=True)
        found.append(path)
        return ""

    return _PICTURE.sub(taken, text).strip() if text else "", found


def _begins_with_picture(text: str) -> bool:
    """Whether the text begins with the path of an existing picture, such as a dropped file."""
    match = _PICTURE.match(text)
    return match is not None and _path_in(match).is_file()


def _path_in(match: re.Match[str]) -> Path:
    name = match["quoted"] or re.sub(r"\\(.)", r"\1", match["plain"])
    try:
        return expanded(name)
    except ConfigurationError:
        return Path(name)


def _ask(session: ChatSession, text: str) -> None:
    content, images = pictures_in(text)
    try:
        session.ask(content, images)
    except KeyboardInterrupt:
        click.echo()
    except CaravanError as error:
        print_error(str(error))
    except OSError as error:
        print_error(f"{error.filename}: {error.strerror}")


def _set(session: ChatSession, text: str) -> None:
    what, _, value = (part.strip() for part in text.partition(" "))
    setter = SETTERS.get(what)
    if setter is None:
        print_error(f"/set knows {', '.join(SETTERS)}")
    else:
        setter(session, value.strip('"') if what == "system" else value)


def _set_option(session: ChatSession, text: str) -> None:
    name, _, value = (part.strip() for part in text.partition(" "))
    if not name:
        print_error("/set parameter needs a name")
        return
    if not value:
        session.options.pop(name, None)
        return
    try:
        session.options |= [parse_option(name, value)]
    except RequestError as error:
        print_error(str(error))


def _set_format(session: ChatSession, value: str) -> None:
    if value not in ("json", "off"):
        print_error("/set format knows json and off")
        return
    session.form = "json" if value == "json" else None


def _set_verbose(session: ChatSession, value: str) -> None:
    session.verbose = value != "off"


def _set_think(session: ChatSession, value: str) -> None:
    session.think = parse_think(value) if value else None


def _set_system(session: ChatSession, value: str) -> None:
    session.system = value or None


def _show(session: ChatSession, text: str) -> None:
    try:
        shown = session.server.post("/api/show", {"model": session.model})
    except CaravanError as error:
        print_error(str(error))
        return
    details = shown["details"]
    print_pairs(
        (
            ("model", session.model),
            ("server", session.server.host),
            ("family", str(details.get("family", "?"))),
            ("parameters", str(details.get("parameter_size", "?"))),
            ("quantisation", str(details.get("quantization_level", "?"))),
            ("capabilities", ", ".join(shown.get("capabilities", ()))),
            ("system", session.system or "-"),
            ("options", ", ".join(f"{k}={v}" for k, v in session.options.items()) or "-"),
            ("messages", str(len(session.messages))),
        )
    )


def _clear(session: ChatSession, text: str) -> None:
    session.messages.clear()


def _help(session: ChatSession, text: str) -> None:
    print_pairs(HELP)


def _unknown(session: ChatSession, text: str) -> None:
    print_error("no such command; /? shows those that exist")


SETTERS: dict[str, Callable[[ChatSession, str], None]] = {
    "system": _set_system,
    "parameter": _set_option,
    "format": _set_format,
    "think": _set_think,
    "verbose": _set_verbose,
}
COMMANDS: dict[str, Callable[[ChatSession, str], None]] = {
    "set": _set,
    "show": _show,
    "clear": _clear,
    "?": _help,
    "help": _help,
}


def _keep_history() -> None:
    """Keeps the lines of earlier conversations in a file that only this user can read; keeps none
    if the file cannot be written."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    try:
        path = expanded(state) / "caravan" / "history"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        readline.read_history_file(path)
    except (OSError, ConfigurationError):
        return
    readline.set_history_length(_HISTORY_LINES)
    atexit.register(readline.write_history_file, path)
