"""`caravan verify`: compares every blob of a model with its digest."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import click

from model_zoo.sources.pull import Progress, PullProgress
from model_zoo.store.manifest import ManifestLayer
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from runtime.errors import CaravanError
from serve_app.cli.completion import stored_models
from serve_app.cli.progress import progress_reporter
from serve_app.cli.remove import stored_name
from serve_app.cli.shared_options import json_option, store_option
from serve_app.cli.terminal import harmless, print_json

_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of a model's blob, or of its manifest if `layer` is None."""

    model: ModelName
    layer: ManifestLayer | None
    problem: str


@click.command(
    "verify",
    epilog="""\b
Examples:
  caravan verify
  caravan verify llama3.2:1b --repair
""",
)
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=stored_models)
@click.option("--repair", is_flag=True, help="Remove damaged files; the next pull downloads them.")
@store_option
@json_option
def verify(names: tuple[str, ...], repair: bool, store: Store, as_json: bool) -> None:
    """Check the files of the named models, or of all, against their digests.

    The exit status is 1 if a file is damaged.
    """
    models = [stored_name(name) for name in names] or store.names()
    with progress_reporter(as_json=False) as progress:
        findings = list(_findings(store, models, progress))
    damaged = {f.layer for f in findings if f.layer is not None} if repair else set()
    removed = {layer for layer in damaged if store.discard(layer)}
    if as_json:
        print_json(_document(models, findings, removed))
    else:
        _print(models, findings, removed)
    if findings:
        raise click.exceptions.Exit(1)


def _findings(store: Store, models: list[ModelName], progress: Progress) -> Iterator[Finding]:
    """The problems of all models. A blob that several models share is read once."""
    known: dict[str, str | None] = {}
    for model in models:
        try:
            blobs = store.manifest(model).blobs
        except CaravanError as error:
            yield Finding(model, None, str(error))
            continue
        for layer in blobs:
            if layer.digest not in known:
                known[layer.digest] = _problem(store, layer, progress)
            problem = known[layer.digest]
            if problem is not None:
                yield Finding(model, layer, problem)


def _problem(store: Store, layer: ManifestLayer, progress: Progress) -> str | None:
    if not store.blob(layer.digest).is_file():
        return "is missing"
    if not store.holds(layer):
        size = store.blob(layer.digest).stat().st_size
        return f"has {size:,} bytes, not {layer.size:,}"

    def report(completed: int) -> None:
        title = f"reading {layer.digest[7:19]}"
        progress(PullProgress(title, layer.digest, layer.size, completed))

    found = _digest(store, layer, report)
    return None if found == layer.digest else f"has the digest {found}"


def _digest(store: Store, layer: ManifestLayer, report: Callable[[int], None]) -> str:
    digest, done = hashlib.sha256(), 0
    with store.blob(layer.digest).open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            done += len(block)
            report(done)
    return f"sha256:{digest.hexdigest()}"


def _document(
    models: list[ModelName], findings: list[Finding], removed: set[ManifestLayer]
) -> list[dict[str, object]]:
    return [
        {
            "name": str(model),
            "valid": not any(finding.model == model for finding in findings),
            "damaged": [
                {
                    "digest": None if finding.layer is None else finding.layer.digest,
                    "kind": "manifest" if finding.layer is None else finding.layer.kind,
                    "problem": finding.problem,
                    "removed": finding.layer in removed,
                }
                for finding in findings
                if finding.model == model
            ],
        }
        for model in models
    ]


def _print(models: list[ModelName], findings: list[Finding], removed: set[ManifestLayer]) -> None:
    for model in models:
        own = [finding for finding in findings if finding.model == model]
        if not own:
            click.echo(harmless(f"{model}: valid"))
        for finding in own:
            if finding.layer is None:
                click.echo(harmless(f"{model}: {finding.problem}"))
                continue
            what = f"{finding.layer.kind} {finding.layer.digest}"
            done = "; removed, pull the model again" if finding.layer in removed else ""
            click.echo(harmless(f"{model}: {what} {finding.problem}{done}"))
