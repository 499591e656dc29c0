"""`caravan import`: models of Ollama on this machine, without copying them."""

import errno
import os
from pathlib import Path

import click

from model_zoo.sources.ollama_store import default_folder, import_models
from model_zoo.sources.pull import Progress, PullProgress
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from runtime.errors import SourceError
from runtime.home_directory import expanded
from serve_app.cli.progress import progress_reporter
from serve_app.cli.shared_options import json_option, store_option
from serve_app.cli.terminal import harmless, print_json

# The models of the service that Ollama's installer creates.
SERVICE_FOLDER = Path("/usr/share/ollama/.ollama/models")


@click.command(
    "import",
    epilog="""\b
Examples:
  caravan import
  caravan import /mnt/ollama/models llama3.2:1b
""",
)
@click.argument("arguments", metavar="[FOLDER] [NAME]...", nargs=-1)
@store_option
@json_option
def import_(arguments: tuple[str, ...], store: Store, as_json: bool) -> None:
    """Import all models of Ollama, or those named, without copying their files.

    FOLDER is Ollama's folder of models; default: $OLLAMA_MODELS, or else ~/.ollama/models and that
    of its service, /usr/share/ollama/.ollama/models; of these, one that this user cannot read is
    skipped if the other can be read. Removing an imported model does not remove it
    from Ollama. Files are not read: `caravan verify` compares them with their digests.
    """
    folders, names = _split(arguments)
    imported: list[ModelName] = []
    with progress_reporter(as_json=as_json) as progress:
        for name in names:
            imported.append(_import_one(name, folders, store, progress))
        if not names:
            imported = _import_all(folders, store, progress)
    for model in imported:
        if as_json:
            print_json({"imported": str(model)}, line=True)
        else:
            click.echo(harmless(str(model)))


def _import_all(folders: list[Path], store: Store, progress: Progress) -> list[ModelName]:
    """Imports all models of each folder. One that cannot be read is reported and skipped;
    SourceError if none can."""
    imported: list[ModelName] = []
    refusals = []
    for folder in folders:
        try:
            imported += import_models(folder, store, progress=progress)
        except SourceError as error:
            refusals.append(str(error))
    if len(refusals) == len(folders):
        raise SourceError(" ".join(refusals))
    for refusal in refusals:
        progress(PullProgress(f"skipped: {refusal}"))
    return imported


def _import_one(name: str, folders: list[Path], store: Store, progress: Progress) -> ModelName:
    """Imports from the first folder that has the model; SourceError has the reason of each."""
    refusals = []
    for folder in folders:
        try:
            (imported,) = import_models(folder, store, names=[name], progress=progress)
            return imported
        except SourceError as error:
            refusals.append(str(error))
    raise SourceError(" ".join(refusals))


def _split(arguments: tuple[str, ...]) -> tuple[list[Path], tuple[str, ...]]:
    """The folders and the names."""
    if arguments and (arguments[0].startswith((".", "/", "~")) or Path(arguments[0]).is_dir()):
        return [expanded(arguments[0])], arguments[1:]
    own = default_folder(os.environ)
    if os.environ.get("OLLAMA_MODELS"):
        return [own], arguments
    folders = [folder for folder in (own, SERVICE_FOLDER) if _may_exist(folder)]
    if not folders:
        raise SourceError(f"Neither {own} nor {SERVICE_FOLDER} exists; name Ollama's folder.")
    return folders, arguments


def _may_exist(folder: Path) -> bool:
    """False if there is no such path; True also if this user cannot find out."""
    try:
        folder.stat()
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR)
    return True
