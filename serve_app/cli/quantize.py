"""`caravan quantize`: a GGUF file with quantised weights."""

from pathlib import Path

import click

from model_zoo.convert.quantize import quantize_file
from model_zoo.convert.recipes import RECIPES
from serve_app.cli.progress import counted, progress_reporter
from serve_app.cli.shared_options import json_option
from serve_app.cli.terminal import print_written


@click.command(
    "quantize",
    epilog="""\b
Example:
  caravan quantize f16.gguf small.gguf --type q4_k_m
""",
)
@click.argument("source", metavar="IN.gguf", type=click.Path(path_type=Path))
@click.argument("out", metavar="OUT.gguf", type=click.Path(path_type=Path))
@click.option(
    "--type",
    "recipe",
    type=click.Choice(list(RECIPES), case_sensitive=False),
    required=True,
    help="Type of the weights in the new file.",
)
@click.option(
    "--allow-requantize",
    is_flag=True,
    help="Accept a quantised file, which loses quality a second time.",
)
@json_option
def quantize(source: Path, out: Path, recipe: str, allow_requantize: bool, as_json: bool) -> None:
    """Quantise the weights of a GGUF file.

    For a split file, name the first part.
    """
    with progress_reporter(as_json=as_json) as progress:
        path = quantize_file(
            source,
            out,
            recipe,
            allow_requantize=allow_requantize,
            progress=counted(progress, "quantising"),
        )
    print_written([path], as_json=as_json)
