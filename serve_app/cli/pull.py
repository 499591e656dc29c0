"""`caravan pull`: models from the Hugging Face Hub and from registries, into the store."""

import click

from model_zoo.sources import pull as pulling
from model_zoo.sources.reference import RemoteSource, is_path
from model_zoo.store.store import Store
from runtime.errors import CaravanError, SourceError
from serve_app.cli.completion import stored_models
from serve_app.cli.progress import progress_reporter
from serve_app.cli.remove import remove_unused
from serve_app.cli.shared_options import json_option, store_option
from serve_app.cli.terminal import byte_size, harmless, print_error, print_json
from serve_app.config.model_sources import named_source


@click.command(
    "pull",
    epilog="""\b
Examples:
  caravan pull llama3.2:1b
  caravan pull hf://org/repo:Q4_K_M
""",
)
@click.argument(
    "sources", metavar="SOURCE...", nargs=-1, required=True, shell_complete=stored_models
)
@store_option
@json_option
def pull(sources: tuple[str, ...], store: Store, as_json: bool) -> None:
    """Pull models into the store, or update them.

    A SOURCE is hf://org/repo[:quantisation] or hf://org/repo/file.gguf, each with [@revision], or a
    name of a registry: llama3.2:1b, ollama://[host/][namespace/]name[:tag]. An interrupted pull
    resumes when it is repeated. If one model fails, the others are still pulled; the exit status is
    then 1. At the end, files are removed that no model has used for a day, such as those of older
    versions.
    """
    failed = False
    for text in sources:
        try:
            pull_one(remote_source(text, store), store, as_json=as_json)
        except CaravanError as error:
            print_error(str(error), as_json=as_json)
            failed = True
    remove_unused(store, as_json=as_json)
    if failed:
        raise click.exceptions.Exit(1)


def pull_one(source: RemoteSource, store: Store, *, as_json: bool) -> None:
    """Pull a model with progress on standard error; after an interrupt, say how to resume."""
    try:
        with progress_reporter(as_json=as_json) as progress:
            model = pulling.pull(source, store, progress=progress)
    except KeyboardInterrupt:
        click.echo(f"Interrupted; `caravan pull {source}` resumes.", err=True)
        raise
    size = model.manifest.size_bytes
    if as_json:
        done = {"pulled": str(model.name), "bytes": size, "files": list(map(str, model.files))}
        print_json(done, line=True)
    else:
        click.echo(harmless(f"{model.name}: {byte_size(size)}"))


def remote_source(text: str, store: Store) -> RemoteSource:
    """The source to pull from. SourceError if the text is a path."""
    if is_path(text):
        raise SourceError(f"{text} is a path; files are served without a pull.")
    return named_source(text, store)
