"""`caravan create`: a model by a Modelfile."""

import dataclasses
from pathlib import Path
from typing import TextIO

import click

from model_zoo.convert.recipes import RECIPES
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.split import further_parts
from model_zoo.store import creation
from model_zoo.store.definition import Definition
from model_zoo.store.importing import import_file
from model_zoo.store.store import Store
from runtime.errors import RequestError
from serve_app.cli.options import json_option, store_option
from serve_app.cli.progress import Reporter, reporter
from serve_app.cli.remove import stored_name
from serve_app.cli.terminal import byte_size, harmless, print_json
from serve_app.on_demand.definitions import named_base, of_modelfile


@click.command("create")
@click.argument("name", metavar="NAME")
@click.option(
    "-f",
    "--file",
    "modelfile",
    type=click.File(encoding="utf-8"),
    default="Modelfile",
    show_default=True,
    help="Where the Modelfile is; - for standard input.",
)
@click.option(
    "-q",
    "--quantize",
    "recipe",
    type=click.Choice(list(RECIPES), case_sensitive=False),
    help="Make weights of 16 or 32 bits smaller.",
)
@store_option
@json_option
def create(name: str, modelfile: TextIO, recipe: str | None, store: Store, as_json: bool) -> None:
    """Make a model by a Modelfile.

    Its FROM names a model of the store, one that is elsewhere, which is pulled, or a GGUF file; of
    a split model the first part. PARAMETER, SYSTEM, TEMPLATE (in Jinja), MESSAGE and LICENSE say
    what is to differ. Files are copied into the store.
    """
    new = stored_name(name)
    try:
        text = modelfile.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"{modelfile.name}: is no text: {error}.") from None
    folder = Path(getattr(modelfile, "name", "")).parent
    with reporter(as_json=as_json) as progress:
        definition = of_modelfile(text, lambda stated: _material(stated, folder, store, progress))
        definition = dataclasses.replace(definition, quantize=recipe)
        model = creation.create(new, definition, store, progress=progress)
    size = model.manifest.size_bytes
    if as_json:
        print_json({"created": str(model.name), "bytes": size}, line=True)
    else:
        click.echo(harmless(f"{model.name}: {byte_size(size)}"))


def _material(stated: str, folder: Path, store: Store, progress: Reporter) -> Definition:
    """A file where one lies there, seen from the Modelfile; else the name of a model."""
    path = folder / Path(stated).expanduser()
    if not (path.is_file() or stated.startswith((".", "/", "~"))):
        return Definition(base=named_base(stated))
    file = GGUFFile.open(path, arrays=False)
    parts = [path, *further_parts(path, file.metadata)]
    return Definition(
        files={part.name: import_file(part, store, progress=progress).digest for part in parts}
    )
