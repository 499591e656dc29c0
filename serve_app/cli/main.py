"""The command `caravan`: its subcommands, and what becomes of errors and interrupts."""

import errno
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType
from typing import Any

import click

from runtime.errors import CaravanError
from serve_app.cli.options import wants_json
from serve_app.cli.terminal import harmless, print_error

INTERRUPTED = 130

# name -> ("module:command", what it does); a module is imported when its command is used, since
# some need a tensor library and most do not.
COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "pull": ("serve_app.cli.pull:pull", "Fetch models into the store."),
        "import": ("serve_app.cli.imports:import_", "Take over models of Ollama, without a copy."),
        "list": ("serve_app.cli.listing:list_", "List the models in the store; also `ls`."),
        "show": ("serve_app.cli.show:show", "Show what a model is and what memory it needs."),
        "verify": ("serve_app.cli.verify:verify", "Read models to the end; say what is damaged."),
        "convert": ("serve_app.cli.convert:convert", "Make a GGUF file of a Hugging Face folder."),
        "quantize": ("serve_app.cli.quantize:quantize", "Make a GGUF file smaller."),
        "create": ("serve_app.cli.create:create", "Make a model of another one, or of files."),
        "cp": ("serve_app.cli.copying:copy", "Give a model a second name."),
        "rm": ("serve_app.cli.remove:remove", "Remove models from the store."),
        "key": ("serve_app.cli.keys:key", "Make API keys for a server."),
    }
)
ALIASES: Mapping[str, str] = MappingProxyType({"ls": "list"})


class Failure(click.ClickException):
    """Exit status 1, and one line that says why; `as_json`: an object, on standard output."""

    def __init__(self, message: str, *, as_json: bool = False) -> None:
        super().__init__(message)
        self._as_json = as_json

    def show(self, file: Any = None) -> None:
        print_error(self.message, as_json=self._as_json)


class Commands(click.Group):
    """Subcommands by the table above; errors meant for a person become one line each."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        cmd_name = ALIASES.get(cmd_name, cmd_name)
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        return getattr(import_module(module), attribute)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            near = get_close_matches(args[0], [*COMMANDS, *ALIASES], n=1)
            hint = f"; did you mean `{near[0]}`?" if near else "."
            ctx.fail(f"There is no command {harmless(args[0])!r}{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, what) for name, (_, what) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CaravanError as error:
            raise Failure(str(error), as_json=wants_json(ctx)) from None
        except KeyboardInterrupt:
            raise click.exceptions.Exit(INTERRUPTED) from None
        except OSError as error:
            if error.errno == errno.EPIPE:  # whoever read this has gone; click knows what to do
                raise
            place = f"{error.filename}: " if error.filename else ""
            problem = f"{place}{error.strerror or error}."
            raise Failure(problem, as_json=wants_json(ctx)) from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="caravan", prog_name="caravan")
def caravan() -> None:
    """Models in GGUF: fetch, look at, check, make and remove them.

    A model is named as in `llama3.2:1b` or `hf://org/repo:Q4_K_M`.
    """


def main() -> None:
    """The console script; ends the process."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    caravan(prog_name="caravan")
