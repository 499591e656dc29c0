"""The command `caravan`: its subcommands, error messages and exit statuses."""

import errno
import os
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType
from typing import Any

import click
from click.shell_completion import CompletionItem

from runtime.errors import CaravanError
from serve_app.cli.shared_options import wants_json
from serve_app.cli.terminal import harmless, print_error

INTERRUPTED = 130

# name -> ("module:command", help). A module is imported when its command is used, because few of
# them need a tensor library.
COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "serve": ("serve_app.cli.serve:serve", "Serve models on this machine."),
        "run": ("serve_app.cli.run:run", "Ask a model of a server, or talk with it."),
        "ps": ("serve_app.cli.loaded:ps", "List the models that a server has loaded."),
        "stop": ("serve_app.cli.loaded:stop", "Unload a model."),
        "bench": ("serve_app.cli.bench:bench", "Measure a server under load."),
        "logs": ("serve_app.cli.logs:logs", "Show the log of `caravan serve`."),
        "pull": ("serve_app.cli.pull:pull", "Fetch models into the store."),
        "import": (
            "serve_app.cli.imports:import_",
            "Import models of Ollama without copying them.",
        ),
        "list": ("serve_app.cli.list_models:list_", "List the models in the store; also `ls`."),
        "show": ("serve_app.cli.show:show", "Show facts about a model and the memory it needs."),
        "verify": (
            "serve_app.cli.verify:verify",
            "Check the files of models against their digests.",
        ),
        "convert": ("serve_app.cli.convert:convert", "Convert a Hugging Face folder to GGUF."),
        "quantize": ("serve_app.cli.quantize:quantize", "Quantise a GGUF file."),
        "create": ("serve_app.cli.create:create", "Create a model from a Modelfile."),
        "cp": ("serve_app.cli.copying:copy", "Give a model a second name."),
        "rm": ("serve_app.cli.remove:remove", "Remove models from the store."),
        "completion": (
            "serve_app.cli.completion:completion",
            "Print the script that completes commands in a shell.",
        ),
        "key": ("serve_app.cli.keys:key", "Create API keys for a server."),
    }
)
ALIASES: Mapping[str, str] = MappingProxyType({"ls": "list"})


class CommandFailed(click.ClickException):
    """Exit status 1 and one line of text; with `as_json` an object on standard output."""

    def __init__(self, message: str, *, as_json: bool = False) -> None:
        super().__init__(message)
        self._as_json = as_json

    def show(self, file: Any = None) -> None:
        print_error(self.message, as_json=self._as_json)


class Commands(click.Group):
    """The subcommands of the table above; expected errors become one line."""

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
        unknown = self.get_command(ctx, args[0]) is None and not args[0].startswith("-")
        if unknown and not ctx.resilient_parsing:
            near = get_close_matches(args[0], [*COMMANDS, *ALIASES], n=1)
            hint = f"; did you mean `{near[0]}`?" if near else "."
            ctx.fail(f"No such command: {harmless(args[0])!r}{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, what) for name, (_, what) in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Commands and options, without an import of the commands' modules."""
        options = click.Command.shell_complete(self, ctx, incomplete)
        begun = [name for name in COMMANDS if name.startswith(incomplete)]
        return [*(CompletionItem(name, help=COMMANDS[name][1]) for name in begun), *options]

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CaravanError as error:
            raise CommandFailed(str(error), as_json=wants_json(ctx)) from None
        except KeyboardInterrupt:
            raise click.exceptions.Exit(INTERRUPTED) from None
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of a pipe has exited; click handles that
                raise
            place = f"{error.filename}: " if error.filename else ""
            problem = f"{place}{error.strerror or error}."
            raise CommandFailed(problem, as_json=wants_json(ctx)) from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="caravan", prog_name="caravan")
def caravan() -> None:
    """Serve models and chat with them; pull, inspect, check, create and remove GGUF models.

    Names of models: `llama3.2:1b`, `hf://org/repo:Q4_K_M`.
    """


def main() -> None:
    """The console script; ends the process."""
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    caravan(prog_name="caravan")


def _open_standard_streams() -> None:
    """Opens /dev/null in place of closed standard streams, whose descriptors files and sockets
    would get, and other processes take for their streams."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
