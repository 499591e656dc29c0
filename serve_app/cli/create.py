"""`caravan create`: a model from a Modelfile."""

import dataclasses
from pathlib import Path
from typing import TextIO

import click

from model_zoo.convert.convert_folder import convert
from model_zoo.convert.recipes import RECIPES
from model_zoo.gguf.model_headers import ModelHeaders
from model_zoo.gguf.split import further_parts
from model_zoo.sources.pull import Progress
from model_zoo.store import creation
from model_zoo.store.definition import Definition
from model_zoo.store.importing import import_file
from model_zoo.store.store import Store
from runtime.errors import RequestError
from serve_app.cli.progress import counted, progress_reporter
from serve_app.cli.remove import stored_name
from serve_app.cli.shared_options import json_option, store_option
from serve_app.cli.terminal import byte_size, harmless, print_json
from serve_app.on_demand.definitions import definition_from_modelfile, named_base


@click.command(
    "create",
    epilog="""\b
Examples:
  caravan create mine
  caravan create mine -f Modelfile --quantize q4_k_m
""",
)
@click.argument("name", metavar="NAME")
@click.option(
    "-f",
    "--file",
    "modelfile",
    type=click.File(encoding="utf-8"),
    default="Modelfile",
    show_default=True,
    help="Path of the Modelfile; - for standard input.",
)
@click.option(
    "-q",
    "--quantize",
    "recipe",
    type=click.Choice(list(RECIPES), case_sensitive=False),
    help="Quantise weights of 16 or 32 bits.",
)
@store_option
@json_option
def create(name: str, modelfile: TextIO, recipe: str | None, store: Store, as_json: bool) -> None:
    """Create a model from a Modelfile.

    FROM names a model of the store, a model to pull, a GGUF file (the first part of a split one),
    or a folder with config.json and safetensors, which is converted. ADAPTER names a GGUF file with
    a LoRA adapter. PARAMETER, SYSTEM, TEMPLATE (in Jinja, or in Go as in Ollama), MESSAGE and
    LICENSE override or extend it. Files are copied into the store.
    """
    new = stored_name(name)
    try:
        text = modelfile.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"{modelfile.name}: is not UTF-8 text: {error}.") from None
    folder = Path(getattr(modelfile, "name", "")).parent
    with progress_reporter(as_json=as_json) as progress:
        definition = definition_from_modelfile(
            text,
            lambda stated: _resolve_base(stated, folder, store, progress),
            lambda stated: _resolve_adapter(stated, folder, store, progress),
        )
        definition = dataclasses.replace(definition, quantize=recipe)
        model = creation.create(new, definition, store, progress=progress)
    size = model.manifest.size_bytes
    if as_json:
        print_json({"created": str(model.name), "bytes": size}, line=True)
    else:
        click.echo(harmless(f"{model.name}: {byte_size(size)}"))


def _resolve_base(stated: str, folder: Path, store: Store, progress: Progress) -> Definition:
    """The base of a FROM line: a path relative to the Modelfile, or else the name of a model."""
    path = folder / Path(stated).expanduser()
    is_checkpoint = (path / "config.json").is_file()
    if not (path.is_file() or is_checkpoint or stated.startswith((".", "/", "~"))):
        return Definition(base=named_base(stated))
    if is_checkpoint:
        return _converted(path, store, progress)
    file = ModelHeaders.open(path)
    parts = [path, *further_parts(path, file.metadata)]
    return Definition(
        files={part.name: import_file(part, store, progress=progress).digest for part in parts}
    )


def _converted(checkpoint: Path, store: Store, progress: Progress) -> Definition:
    """The files of a folder of safetensors as GGUF."""
    with store.temporary_folder() as folder:
        paths = convert(checkpoint, folder / "model.gguf", progress=counted(progress, "converting"))
        layers = {
            path.name: import_file(path, store, may_link=True, progress=progress) for path in paths
        }
    return Definition(files={name: layer.digest for name, layer in layers.items()})


def _resolve_adapter(stated: str, folder: Path, store: Store, progress: Progress) -> str:
    """The digest of an ADAPTER line's file, a path relative to the Modelfile; imported."""
    path = folder / Path(stated).expanduser()
    if path.is_dir():
        raise RequestError(
            f"{path}: is a folder; ADAPTER needs a GGUF file, such as llama.cpp's "
            "convert_lora_to_gguf.py writes."
        )
    return import_file(path, store, progress=progress).digest
