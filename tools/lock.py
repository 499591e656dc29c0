"""`python -m tools.lock`: writes k8s/requirements*.lock, the image's packages with their hashes.

pip resolves the requirements of pyproject.toml at the versions of constraints.txt, and reports the
files that it would install and their SHA-256. They are wheels for the platform and Python of this
machine: run it on Linux x86-64 with CPython 3.11, as in the image. PyTorch and the packages of its
CUDA build have a separate file; the CPU build is from another index, without a hash here.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOCK, CUDA_LOCK = ROOT / "k8s" / "requirements.lock", ROOT / "k8s" / "requirements-cuda.lock"
# Packages that only PyTorch's CUDA build needs.
_CUDA = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
_INDEX = "https://pypi.org/simple"


def main() -> None:
    packages = {_name(item): _line(item) for item in _resolved()}
    cuda = {name: line for name, line in packages.items() if _CUDA.fullmatch(name)}
    _write(LOCK, packages.keys() - cuda.keys(), packages)
    _write(CUDA_LOCK, cuda.keys(), packages)


def _resolved() -> list[dict[str, Any]]:
    """The packages that pip would install, from `pip install --report`; nothing is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--isolated", "--quiet"]
        command += ["--dry-run", "--ignore-installed", "--only-binary", ":all:"]
        command += ["--index-url", _INDEX, "-c", str(ROOT / "constraints.txt")]
        subprocess.run([*command, "--report", str(report), *wanted], check=True)
        return json.loads(report.read_text())["install"]


def _name(item: Mapping[str, Any]) -> str:
    return re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()


def _line(item: Mapping[str, Any]) -> str:
    digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
    return f"{_name(item)}=={item['metadata']['version']} --hash=sha256:{digest}\n"


def _write(path: Path, names: Iterable[str], packages: Mapping[str, str]) -> None:
    head = "# Written by `python -m tools.lock`, for Linux x86-64 and CPython 3.11.\n"
    path.write_text(head + "".join(packages[name] for name in sorted(names)))
    print(f"{path.relative_to(ROOT)}: {len(list(names))} packages")


if __name__ == "__main__":
    main()
