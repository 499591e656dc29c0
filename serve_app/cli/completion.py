"""`caravan completion`, and the names of models that shells complete."""

import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress

import click
from click.shell_completion import CompletionItem, get_completion_class

from model_zoo.store.store import Store, default_root
from runtime.errors import CaravanError

_TIMEOUT_S = 1.0
_MOST_NAMES = 1_000
_VARIABLE = "_CARAVAN_COMPLETE"
# Other names could break the line protocol between click and the shell, or look like options.
_COMPLETED_NAME = re.compile(r"[A-Za-z0-9_/.][A-Za-z0-9_/.:@+-]{0,255}")
# bash splits words at colons, which occur in the names of models.
_KEEP_COLONS = "COMP_WORDBREAKS=${COMP_WORDBREAKS//:}\n"


@click.command(
    epilog="""\b
Examples:
  echo 'eval "$(caravan completion bash)"' >> ~/.bashrc
  echo 'eval "$(caravan completion zsh)"' >> ~/.zshrc
  caravan completion fish > ~/.config/fish/completions/caravan.fish
"""
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script with which a shell completes commands, options and names of models."""
    made = get_completion_class(shell)
    assert made is not None
    script = made(context.find_root().command, {}, "caravan", _VARIABLE).source()
    click.echo((_KEEP_COLONS if shell == "bash" else "") + script, nl=False)


def stored_models(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """The names of the models in the store, or else paths."""
    store = context.params.get("store") or Store(default_root(os.environ))
    found = _items(incomplete, lambda: map(str, store.names()))
    return found or [CompletionItem(incomplete, type="file")]


def served_models(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """The names of the models of the server."""
    return _items(incomplete, lambda: _names(context, "/api/tags"))


def loaded_models(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """The names of the models that the server has loaded."""
    return _items(incomplete, lambda: _names(context, "/api/ps"))


def _names(context: click.Context, path: str) -> list[str]:
    """The names in a document like that of Ollama's `/api/tags`; none if the server's URL is
    invalid."""
    server = context.params.get("server")
    document = server.get(path, timeout_s=_TIMEOUT_S) if server else {"models": []}
    return [str(model["name"]) for model in document["models"]]


def _items(incomplete: str, names: Callable[[], Iterable[str]]) -> list[CompletionItem[str]]:
    """Completions that match. None after an error: messages would disturb the input line."""
    found: list[str] = []
    with suppress(CaravanError, OSError, LookupError, TypeError):
        found = [name for name in names() if _COMPLETED_NAME.fullmatch(name)]
    begun = [name for name in found if name.startswith(incomplete)]
    return [CompletionItem(name) for name in begun[:_MOST_NAMES]]
