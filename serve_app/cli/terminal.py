"""Output to a terminal: escaped texts, sizes, tables and JSON.

Names, metadata and templates come from untrusted files, so characters that move the cursor, change
colours or reverse the direction of text are escaped.
"""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

# The terminal wraps long lines; if they were truncated or folded, they could not be copied.
_WIDTH = 100_000
_SIZES = ("kB", "MB", "GB", "TB")


def harmless(text: str) -> str:
    """One line, with unprintable characters as escapes such as `\\x1b` and `\\n`."""
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def harmless_lines(text: str) -> list[str]:
    """The same for several lines; tabs are kept."""
    lines = text.replace("\r\n", "\n").split("\n")
    return ["\t".join(map(harmless, line.split("\t"))) for line in lines]


def shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def byte_size(count: int) -> str:
    """In powers of ten: "812 bytes", "4.7 GB"."""
    if count < 1000:
        return f"{count} byte{'' if count == 1 else 's'}"
    power = min(len(_SIZES), int(math.log10(count)) // 3)
    return f"{count / 1000**power:.{1 if power < 3 else 2}f} {_SIZES[power - 1]}"


def short_count(count: int) -> str:
    """Such as "8.03 B", "134.5 M", "30 k"."""
    for size, letter, digits in ((10**9, "B", 2), (10**6, "M", 1), (10**3, "k", 0)):
        if count >= size:
            return f"{count / size:.{digits}f} {letter}"
    return str(count)


def local_date(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M")


def iso_date(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")


def print_error(message: str, *, as_json: bool = False) -> None:
    """One line on standard error, or one JSON object on standard output."""
    if as_json:
        print_json({"error": message}, line=True)
    else:
        click.echo(f"caravan: {harmless(message)}", err=True)


def print_note(message: str) -> None:
    """Print one line for a person to standard error, if that is a terminal."""
    if sys.stderr.isatty():
        click.echo(f"caravan: {harmless(message)}", err=True)


def print_title(text: str) -> None:
    click.secho(harmless(text), bold=True)


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Names in one column and values in another, escaped."""
    rows = [(harmless(name), harmless(value)) for name, value in pairs]
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        click.echo(f"  {name:<{width}}  {value}".rstrip())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table with escaped cells; columns whose names end in ">" are aligned to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for name in columns:
        right = name.endswith(">")
        table.add_column(name.rstrip(">"), justify="right" if right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(harmless(cell)) for cell in row))
    console = Console(file=sys.stdout, width=_WIDTH, markup=False, highlight=False, emoji=False)
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        click.echo(line.rstrip())


def print_json(value: Any, *, line: bool = False) -> None:
    """Print one JSON document, indented, or as one of several lines. Characters beyond ASCII are
    escaped."""
    indent = None if line else 2
    click.echo(json.dumps(plain(value), ensure_ascii=True, allow_nan=False, indent=indent))


def print_written(paths: Iterable[Path], *, as_json: bool) -> None:
    """Print the files that a command has written, with their sizes."""
    for path in paths:
        size = path.stat().st_size
        if as_json:
            print_json({"written": str(path), "bytes": size}, line=True)
        else:
            click.echo(harmless(f"{path}: {byte_size(size)}"))


def plain(value: Any) -> Any:
    """The value in JSON types: arrays as lists, non-finite numbers as "nan", "inf", "-inf"."""
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
