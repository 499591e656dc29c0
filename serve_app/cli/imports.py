"""`caravan import`: models that Ollama has on this machine, taken over without a copy."""

import os
from pathlib import Path

import click

from model_zoo.sources.ollama_store import default_folder, import_models
from model_zoo.sources.pull import Progress
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from runtime.errors import SourceError
from serve_app.cli.options import json_option, store_option
from serve_app.cli.progress import reporter
from serve_app.cli.terminal import harmless, print_json

# Where the service that Ollama's installer sets up keeps its models.
SERVICE_FOLDER = Path("/usr/share/ollama/.ollama/models")


@click.command("import")
@click.argument("arguments", metavar="[FOLDER] [NAME]...", nargs=-1)
@store_option
@json_option
def import_(arguments: tuple[str, ...], store: Store, as_json: bool) -> None:
    """Take over models of Ollama, all of them or those named, without a copy.

    FOLDER is where Ollama keeps them; otherwise $OLLAMA_MODELS, or else ~/.ollama/models and that
    of its service, /usr/share/ollama/.ollama/models. Removing a model here leaves Ollama's alone.
    Files are taken as they are: `caravan verify` compares them with their digests.
    """
    folders, names = _split(arguments)
    imported: list[ModelName] = []
    with reporter(as_json=as_json) as progress:
        for name in names:
            imported.append(_import_one(name, folders, store, progress))
        for folder in folders if not names else ():
            imported += import_models(folder, store, progress=progress)
    for model in imported:
        if as_json:
            print_json({"imported": str(model)}, line=True)
        else:
            click.echo(harmless(str(model)))


def _import_one(name: str, folders: list[Path], store: Store, progress: Progress) -> ModelName:
    """From the first folder that has it; SourceError tells why none gives it."""
    refusals = []
    for folder in folders:
        try:
            (imported,) = import_models(folder, store, names=[name], progress=progress)
            return imported
        except SourceError as error:
            refusals.append(str(error))
    raise SourceError(" ".join(refusals))


def _split(arguments: tuple[str, ...]) -> tuple[list[Path], tuple[str, ...]]:
    """The folders to look in, and the names to look for."""
    if arguments and (arguments[0].startswith((".", "/", "~")) or Path(arguments[0]).is_dir()):
        return [Path(arguments[0]).expanduser()], arguments[1:]
    own = default_folder(os.environ)
    if os.environ.get("OLLAMA_MODELS"):
        return [own], arguments
    folders = [folder for folder in (own, SERVICE_FOLDER) if folder.is_dir()]
    if not folders:
        raise SourceError(f"Ollama has no models in {own} or {SERVICE_FOLDER}; name the folder.")
    return folders, arguments
