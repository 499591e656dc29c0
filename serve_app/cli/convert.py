"""`caravan convert`: a checkpoint of the Hugging Face Hub to GGUF."""

from pathlib import Path

import click

from model_zoo.convert.convert_folder import convert as write
from model_zoo.convert.mapping import FLAVOURS
from model_zoo.convert.recipes import RECIPES
from serve_app.cli.progress import counted, progress_reporter
from serve_app.cli.shared_options import json_option
from serve_app.cli.terminal import print_written


@click.command(
    "convert",
    epilog="""\b
Example:
  caravan convert ~/models/Qwen3-8B qwen3-8b.gguf --type q8_0
""",
)
@click.argument("folder", metavar="HF_FOLDER", type=click.Path(path_type=Path))
@click.argument("out", metavar="OUT.gguf", type=click.Path(path_type=Path))
@click.option(
    "--type",
    "recipe",
    type=click.Choice(list(RECIPES), case_sensitive=False),
    help="Type of the weights. Default: as stored (blocks of quantised ones, BF16), else F16.",
)
@click.option(
    "--flavour",
    type=click.Choice(list(FLAVOURS)),
    help="Names of tensors and metadata, where llama.cpp and Ollama differ; by default "
    "llama.cpp's, if it has the architecture.",
)
@json_option
def convert(
    folder: Path, out: Path, recipe: str | None, flavour: str | None, as_json: bool
) -> None:
    """Convert a folder with config.json, safetensors and a tokenizer to a GGUF file."""
    with progress_reporter(as_json=as_json) as progress:
        paths = write(
            folder, out, type=recipe, flavour=flavour, progress=counted(progress, "converting")
        )
    print_written(paths, as_json=as_json)
