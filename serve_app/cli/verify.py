"""`caravan verify`: every blob of a model, read to its end and compared with its digest."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import click

from model_zoo.sources.pull import PullProgress
from model_zoo.store.manifest import Layer
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from runtime.errors import CaravanError
from serve_app.cli.options import json_option, store_option
from serve_app.cli.progress import Reporter, reporter
from serve_app.cli.remove import stored_name
from serve_app.cli.terminal import harmless, print_json

_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with a model, or with one blob of it; `layer` None: with its manifest."""

    model: ModelName
    layer: Layer | None
    problem: str


@click.command("verify")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--repair", is_flag=True, help="Drop damaged files; the next pull brings them anew.")
@store_option
@json_option
def verify(names: tuple[str, ...], repair: bool, store: Store, as_json: bool) -> None:
    """Read the models named, or all, to their end, and say which files are damaged.

    The exit status is 1 when any is.
    """
    models = [stored_name(name) for name in names] or store.names()
    with reporter(as_json=False) as progress:
        findings = list(_findings(store, models, progress))
    damaged = {f.layer for f in findings if f.layer is not None} if repair else set()
    dropped = {layer for layer in damaged if store.discard(layer)}
    if as_json:
        print_json(_document(models, findings, dropped))
    else:
        _print(models, findings, dropped)
    if findings:
        raise click.exceptions.Exit(1)


def _findings(store: Store, models: list[ModelName], progress: Reporter) -> Iterator[Finding]:
    """A blob that several models share is read once."""
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


def _problem(store: Store, layer: Layer, progress: Reporter) -> str | None:
    if not store.blob(layer.digest).is_file():
        return "is missing"
    if not store.holds(layer):
        size = store.blob(layer.digest).stat().st_size
        return f"has {size:,} bytes, not {layer.size:,}"

    def tell(completed: int) -> None:
        title = f"reading {layer.digest[7:19]}"
        progress(PullProgress(title, layer.digest, layer.size, completed))

    found = _digest(store, layer, tell)
    return None if found == layer.digest else f"holds something else, with the digest {found}"


def _digest(store: Store, layer: Layer, tell: Callable[[int], None]) -> str:
    digest, done = hashlib.sha256(), 0
    with store.blob(layer.digest).open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            done += len(block)
            tell(done)
    return f"sha256:{digest.hexdigest()}"


def _document(
    models: list[ModelName], findings: list[Finding], dropped: set[Layer]
) -> list[dict[str, object]]:
    return [
        {
            "name": str(model),
            "sound": not any(finding.model == model for finding in findings),
            "damaged": [
                {
                    "digest": None if finding.layer is None else finding.layer.digest,
                    "kind": "manifest" if finding.layer is None else finding.layer.kind,
                    "problem": finding.problem,
                    "dropped": finding.layer in dropped,
                }
                for finding in findings
                if finding.model == model
            ],
        }
        for model in models
    ]


def _print(models: list[ModelName], findings: list[Finding], dropped: set[Layer]) -> None:
    for model in models:
        own = [finding for finding in findings if finding.model == model]
        if not own:
            click.echo(harmless(f"{model}: sound"))
        for finding in own:
            if finding.layer is None:
                click.echo(harmless(f"{model}: {finding.problem}"))
                continue
            what = f"{finding.layer.kind} {finding.layer.digest}"
            done = "; dropped, pull the model again" if finding.layer in dropped else ""
            click.echo(harmless(f"{model}: {what} {finding.problem}{done}"))
