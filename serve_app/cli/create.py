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
from model_zoo.sources.reference import is_written_as_path
from model_zoo.store import creation
from model_zoo.store.definition import Definition
from model_zoo.store.importing import import_file
from model_zoo.store.manifest import ManifestLayer
from model_zoo.store.store import Store
from runtime.errors import RequestError
from runtime.home_directory import expanded
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
    with (
        progress_reporter(as_json=as_json) as progress,
        _Files(folder, recipe, store, progress) as files,
    ):
        definition = definition_from_modelfile(text, files.base, files.adapter)
        if not files.converted:
            definition = dataclasses.replace(definition, quantize=recipe)
        model = creation.create(new, definition, store, progress=progress)
    size = model.manifest.size_bytes
    if as_json:
        print_json({"created": str(model.name), "bytes": size}, line=True)
    else:
        click.echo(harmless(f"{model.name}: {byte_size(size)}"))


class _Files:
    """Brings the files that a Modelfile names into the store, and removes those that no model uses
    in the end: those of a failed creation, and those of which a quantised copy was made."""

    def __init__(self, folder: Path, recipe: str | None, store: Store, progress: Progress) -> None:
        """`folder`: that of the Modelfile, to which paths are relative; `recipe`: for folders of
        safetensors."""
        self._folder, self._recipe = folder, recipe
        self._store, self._progress = store, progress
        self._imported: list[ManifestLayer] = []
        self.converted = False  # whether the model is a folder of safetensors

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *failure: object) -> None:
        self._store.remove_blobs(self._imported)

    def base(self, stated: str) -> Definition:
        """The base of a FROM line: a path, or else the name of a model."""
        path = self._folder / expanded(stated)
        is_checkpoint = (path / "config.json").is_file()
        if not (path.is_file() or is_checkpoint or is_written_as_path(stated)):
            return Definition(base=named_base(stated))
        if is_checkpoint:
            return Definition(files=self._convert(path))
        parts = [path, *further_parts(path, ModelHeaders.open(path).metadata)]
        return Definition(files={part.name: self._import(part) for part in parts})

    def adapter(self, stated: str) -> str:
        """The digest of an ADAPTER line's file."""
        path = self._folder / expanded(stated)
        if path.is_dir():
            raise RequestError(
                f"{path}: is a folder; ADAPTER needs a GGUF file, such as llama.cpp's "
                "convert_lora_to_gguf.py writes."
            )
        return self._import(path)

    def _convert(self, checkpoint: Path) -> dict[str, str]:
        """The digests of a folder's GGUF files by name, with weights of the recipe."""
        self.converted = True
        with self._store.temporary_folder() as folder:
            paths = convert(
                checkpoint,
                folder / "model.gguf",
                type=self._recipe,
                progress=counted(self._progress, "converting"),
            )
            return {path.name: self._import(path, may_link=True) for path in paths}

    def _import(self, path: Path, *, may_link: bool = False) -> str:
        """The file's digest."""
        layer = import_file(path, self._store, may_link=may_link, progress=self._progress)
        self._imported.append(layer)
        return layer.digest
