"""The folder of the models that measurements write and download."""

import os
from collections.abc import Callable
from pathlib import Path

from runtime.kernels.build import cache_directory

CACHE = cache_directory(os.environ) / "bench"


def written_once(path: Path, write: Callable[[Path], None]) -> Path:
    """The path of a file, which `write` writes, under another name, if it does not exist."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        write(unfinished)
        unfinished.rename(path)
    return path
